"""Draw the pictures from which scripts/train_small_dit.py learns: emoji in one file.

    apt-get download fonts-noto-color-emoji && dpkg-deb -x fonts-noto-color-emoji_*.deb build/font
    python scripts/draw_emoji.py --font build/font/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf

The font is Noto Color Emoji (Google), under the SIL Open Font License 1.1, its images under the
Apache License 2.0; neither the font nor the file of pictures is part of octavo.

The file has sprites, uint8 [names, sizes, 48, 48, 4] (red, green, blue, opacity), names, sizes, and
can_flip, whether a picture in the mirror is as good.
"""

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np

from octavo.atomic import write_atomically
from octavo.errors import ConfigError

FONT_SIZE = 109  # the only size of the font's bitmaps
SPRITE_SIZES = {"large": 40, "small": 26}  # pixels of the longer side, on a canvas of:
CANVAS = 48
DEFAULT_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")

NAMES = """
🐶 dog, 🐱 cat, 🐭 mouse, 🐹 hamster, 🐰 rabbit, 🦊 fox, 🐻 bear, 🐼 panda, 🐨 koala, 🐯 tiger
🦁 lion, 🐮 cow, 🐷 pig, 🐸 frog, 🐵 monkey, 🐔 chicken, 🐧 penguin, 🐦 bird, 🐤 chick
🦆 duck, 🦅 eagle, 🦉 owl, 🐺 wolf, 🐗 boar, 🐴 horse, 🦄 unicorn, 🐝 bee, 🐛 caterpillar
🦋 butterfly, 🐌 snail, 🐞 ladybug, 🐜 ant, 🕷 spider, 🦂 scorpion, 🐢 turtle, 🐍 snake
🦎 lizard, 🦖 dinosaur, 🐙 octopus, 🦑 squid, 🦐 shrimp, 🦀 crab, 🐡 pufferfish
🐠 tropical fish, 🐬 dolphin, 🐳 whale, 🦈 shark, 🐊 crocodile, 🐘 elephant, 🐪 camel
🦒 giraffe, 🐑 sheep, 🦌 deer, 🐓 rooster, 🦃 turkey, 🦜 parrot, 🦢 swan, 🦩 flamingo
🦔 hedgehog, 🐉 dragon, 🌵 cactus, 🌲 pine tree, 🌳 round tree, 🌴 palm tree, 🍀 clover
🍁 maple leaf, 🍄 mushroom, 🌹 rose, 🌷 tulip, 🌻 sunflower, 🌸 blossom, 🌼 daisy, 🌙 moon
⭐ star, ☀ sun, ☁ cloud, 🌈 rainbow, ⚡ lightning, ❄ snowflake, ⛄ snowman, 🔥 fire, 💧 drop
🌊 wave, 🌍 earth, 🍎 red apple, 🍏 green apple, 🍐 pear, 🍊 tangerine, 🍋 lemon, 🍌 banana
🍉 watermelon, 🍇 grapes, 🍓 strawberry, 🍒 cherries, 🍑 peach, 🍍 pineapple, 🥝 kiwi
🍅 tomato, 🍆 eggplant, 🥑 avocado, 🥦 broccoli, 🥒 cucumber, 🌽 corn, 🥕 carrot, 🥔 potato
🍞 bread, 🥐 croissant, 🥨 pretzel, 🧀 cheese, 🍳 fried egg, 🥞 pancakes, 🍔 burger, 🍟 fries
🍕 pizza, 🌭 hotdog, 🌮 taco, 🍣 sushi, 🍦 soft icecream, 🍩 doughnut, 🍪 cookie
🎂 birthday cake, 🍰 shortcake, 🧁 cupcake, 🍫 chocolate, 🍬 candy, 🍭 lollipop, 🍯 honey
🥛 milk, ☕ coffee, 🍺 beer, 🍷 wine, 🍹 cocktail, ⚽ football, 🏀 basketball, 🏈 rugby
⚾ baseball, 🎾 tennis, 🎱 billiards, 🎯 target, 🎲 die, 🎸 guitar, 🎹 piano, 🎺 trumpet
🎻 violin, 🥁 drum, 🎨 palette, 🎁 gift, 🎈 balloon, 🏆 trophy, 🚗 red car, 🚕 taxi, 🚌 bus
🚑 ambulance, 🚒 fire engine, 🚜 tractor, 🚲 bicycle, 🛵 scooter, 🚂 locomotive, ✈ airplane
🚀 rocket, 🚁 helicopter, ⛵ sailboat, 🚢 ship, ⚓ anchor, 🏠 house, 🏰 castle, ⛺ tent
🗽 liberty, 🗿 statue, ⌚ watch, 📱 phone, 💻 laptop, 📷 camera, 📺 television, ⏰ clock
💡 bulb, 🔦 torch, 🕯 candle, 💎 diamond, 🔨 hammer, 🔑 key, 🔒 lock, ✂ scissors, 📎 clip
📚 books, ✏ pencil, ☂ umbrella, 👑 crown, 🎩 hat, 👓 glasses, 👕 shirt, 👖 jeans, 👗 dress
👟 sneaker, 👠 heel, 🎒 backpack, 💍 ring, ❤ red heart, 💙 blue heart, 💚 green heart
💛 yellow heart, 💜 purple heart, 😀 grin, 😎 cool face, 😍 love face, 😭 crying face
😡 angry face, 😱 scared face, 😴 sleeping face, 🤖 robot, 👻 ghost, 👽 alien, 💀 skull
🎃 pumpkin
"""
# These have a side: letters, numbers, or hands of a clock.
ONE_WAY = frozenset(
    ("billiards", "watch", "clock", "ambulance", "phone", "bus", "taxi", "die", "earth")
)


def parse_names() -> dict[str, str]:
    """The character of each name."""
    pairs = [item.split(maxsplit=1) for item in NAMES.replace("\n", ",").split(",") if item.strip()]
    return {name.strip(): character for character, name in pairs}


def draw(font: Any, character: str, size: int) -> np.ndarray[Any, Any]:
    """One character in the middle of the canvas, uint8 [CANVAS, CANVAS, 4]."""
    from PIL import Image, ImageDraw

    wide = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(wide).text((10, 10), character, font=font, embedded_color=True)
    box = wide.getbbox()
    if box is None:
        raise ConfigError(f"expected a picture of {character!r} in the font, got nothing")
    sprite = wide.crop(box)
    shrink = size / max(sprite.size)
    width, height = (max(1, round(side * shrink)) for side in sprite.size)
    sprite = sprite.resize((width, height), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (CANVAS, CANVAS))
    canvas.paste(sprite, ((CANVAS - width) // 2, (CANVAS - height) // 2))
    return np.asarray(canvas)


def draw_all(font_path: Path, names: dict[str, str]) -> dict[str, Any]:
    """The arrays of the file, for these names and their characters."""
    from PIL import ImageFont

    if not font_path.is_file():
        raise ConfigError(f"expected the font at {font_path}, got no file: see --help")
    font = ImageFont.truetype(str(font_path), FONT_SIZE)
    sprites = [[draw(font, c, size) for size in SPRITE_SIZES.values()] for c in names.values()]
    return {
        "sprites": np.array(sprites),
        "names": np.array(list(names)),
        "sizes": np.array(list(SPRITE_SIZES)),
        "can_flip": np.array([name not in ONE_WAY for name in names]),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--font", type=Path, default=DEFAULT_FONT)
    parser.add_argument("--output", type=Path, default=Path("build/emoji.npz"))
    given = parser.parse_args(arguments)
    arrays = draw_all(given.font, parse_names())
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(given.output, content.getvalue())
    size = len(content.getvalue())
    print(f"{given.output}: {len(arrays['names'])} pictures, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
