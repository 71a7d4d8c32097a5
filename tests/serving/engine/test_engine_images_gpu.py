"""Images in the engine on a GPU: the chart reader's answers, and a cache sized beside its tower."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import octavo
from octavo.demo.chart_drawing import generated_questions
from octavo.demo.chart_reader import load_chart_reader

pytestmark = pytest.mark.gpu
SPARE = 16 * 2**30
NUM_QUESTIONS, NUM_RIGHT = 12, 8  # all of the first two charts


def ask(llm, questions):
    prompts = [
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": q.text}]}
            ],
            "images": [q.image],
        }
        for q in questions
    ]
    found = llm.generate(prompts, octavo.Sampling(temperature=0, max_tokens=8))
    return [one.text for one in found]


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", octavo.Recipe(vision_attention="fp8")),
        ("bfloat16", octavo.Recipe(vision_attention="fp8", kv_cache={"granularity": "token"})),
    ],
    ids=["float32", "bf16", "fp8 vision", "all fp8"],
)
def test_answers_are_right(dtype, recipe):
    questions = generated_questions(NUM_QUESTIONS)
    settings = octavo.EngineSettings(max_num_seqs=4, num_pages=64, max_num_batched_tokens=48)
    options = {"recipe": recipe, "dtype": dtype, "device": "cuda", "settings": settings}
    with octavo.LLM("chart-reader", **options) as llm:
        found = ask(llm, questions)
    right = [a in q.answers for a, q in zip(found, questions, strict=True)]
    assert all(right[:NUM_RIGHT])
    if dtype == "float32":
        reader = load_chart_reader(dtype=torch.float32).to("cuda")
        texts = [question.text for question in questions]
        assert found == reader.answer([question.image for question in questions], texts)


def test_the_cache_leaves_room_for_the_tower():
    free, total = torch.cuda.mem_get_info()
    fraction = 1 - (free - SPARE) / total  # all that is in use, and what others may take meanwhile
    settings = octavo.EngineSettings(max_num_seqs=8, memory_fraction=fraction)
    options = {"settings": settings, "dtype": "bfloat16", "device": "cuda"}
    with octavo.LLM("chart-reader", **options) as llm:
        assert ask(llm, generated_questions(4)) == [q.answers[0] for q in generated_questions(4)]
