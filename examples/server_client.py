"""Start `octavo serve`, ask it about a chart as any client of OpenAI's API does, and stop it."""

import base64
import io
import socket
import subprocess
import sys
import time

import httpx
import openai

from octavo.measure.evaluate.chart_drawing import draw_chart
from octavo.measure.evaluate.charts import make_chart

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
command = [sys.executable, "-m", "octavo", "serve", "chart-reader", "--port", str(port)]
command += ["--dtype", "float32", "--mm-encoder-attn-dtype", "fp8", "--kv-cache-dtype", "fp8"]
server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
try:
    while True:  # connections are refused until the model is ready
        assert server.poll() is None, "the server has ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            break
        except httpx.ConnectError:
            time.sleep(0.5)

    chart = make_chart(seed=0)
    file = io.BytesIO()
    draw_chart(chart).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is the title?"},
    ]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="chart-reader", messages=[{"role": "user", "content": content}], temperature=0
        )
    print(f"the title is {answer.choices[0].message.content}")
    assert answer.choices[0].message.content == chart.title
finally:
    server.terminate()
    server.wait()
