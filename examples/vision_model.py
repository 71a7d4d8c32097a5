"""Ask a vision-language model about charts, unquantized and with FP8 vision attention."""

import torch

import octavo
from octavo.demo.chart_drawing import draw_chart
from octavo.demo.chart_reader import load_chart_reader
from octavo.demo.charts import make_chart, make_questions

reader = load_chart_reader(dtype=torch.float32)  # on a GPU: bfloat16, and reader.to("cuda")
charts = [make_chart(seed) for seed in (2, 3)]
images = [draw_chart(chart) for chart in charts]
questions = [make_questions(chart, seed=0, count=1)[0] for chart in charts]
texts = [question.text for question in questions]

plain = reader.answer(images, texts)
print(octavo.apply_(reader.model, octavo.Recipe(vision_attention="fp8")))
fp8 = reader.answer(images, texts)
octavo.restore_(reader.model)

for question, before, after in zip(questions, plain, fp8, strict=True):
    print(f"{question.text} {question.answer}: unquantized {before}, FP8 {after}")
