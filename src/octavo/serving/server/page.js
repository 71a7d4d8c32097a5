const NUM_SAMPLES = 120; // of the plot: two minutes
const WINDOW = 30; // samples that latencies are means of
let conversation = []; // what is sent with the next question
const samples = []; // of /stats, newest last

function show(role, text) {
  byId("empty")?.remove();
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const content = document.createElement("span");
  content.textContent = text;
  message.append(content);
  byId("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return content;
}

function note(content, text, isBad) {
  const line = document.createElement("span");
  line.className = isBad ? "quiet bad" : "quiet";
  line.textContent = text;
  content.parentElement.append(line);
}

// The documents of a stream of server-sent events, one by one.
async function* documents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  const controller = new AbortController();
  const asked = conversation; // Clear begins another one
  setRunning(controller);
  asked.push({ role: "user", content: text });
  show("user", text);
  const content = show("assistant", "");
  const start = performance.now();
  let answer = "";
  let usage = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: controller.signal,
      body: JSON.stringify({
        messages: asked,
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("max-tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const chunk of documents(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      answer += chunk.choices[0]?.delta?.content ?? "";
      content.textContent = answer;
      content.parentElement.scrollIntoView({ block: "end" });
    }
    const seconds = (performance.now() - start) / 1000;
    if (usage) note(content, `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`, false);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    note(content, isStopped ? "stopped" : error.message, !isStopped);
  }
  // A question without an answer would confuse the next turn.
  if (answer) asked.push({ role: "assistant", content: answer });
  else asked.pop();
  setRunning(null);
  byId("prompt").focus();
}

const milliseconds = (seconds) =>
  seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 0)} ms`;

function showTime(name, now, before) {
  const count = now.count - before.count;
  const sum = now.sum_s - before.sum_s;
  const mean = count > 0 ? sum / count : now.count > 0 ? now.sum_s / now.count : null;
  byId(name).textContent = mean === null ? "–" : milliseconds(mean);
}

function rateAt(index) {
  const [before, now] = [samples[index - 1], samples[index]];
  const tokens = now.engine.completion_tokens - before.engine.completion_tokens;
  return Math.max(0, tokens / ((now.time - before.time) / 1000));
}

function plot() {
  const canvas = byId("rate-plot");
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const rates = samples.slice(1).map((_, index) => rateAt(index + 1));
  const most = Math.max(1, ...rates);
  context.fillStyle = getComputedStyle(canvas).color;
  const width = canvas.width / NUM_SAMPLES;
  rates.forEach((rate, index) => {
    const height = (rate / most) * canvas.height;
    const left = canvas.width - (rates.length - index) * width;
    context.fillRect(left, canvas.height - height, Math.max(1, width - 1), height);
  });
}

function showNumbers(stats) {
  samples.push({ ...stats, time: performance.now() });
  if (samples.length > NUM_SAMPLES + 1) samples.shift();
  const { engine, times } = stats;
  showPrecision(stats.precision, stats.saved_bytes);
  const share = engine.num_pages ? engine.num_pages_in_use / engine.num_pages : 0;
  byId("model").textContent = `${stats.model} · context ${stats.max_model_len.toLocaleString()} tokens`;
  byId("pages-share").textContent = `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  byId("pages-meter").value = share;
  byId("pages").textContent = `${engine.num_pages_in_use} of ${engine.num_pages} pages`;
  const cached = engine.prompt_tokens ? (100 * engine.cached_tokens) / engine.prompt_tokens : 0;
  byId("cached").textContent = `${cached.toFixed(0)} % of prompt tokens were in the cache`;
  byId("requests").textContent = `${engine.num_running} running, ${engine.num_waiting} waiting`;
  const before = samples[Math.max(0, samples.length - 1 - WINDOW)];
  for (const name of ["queue", "ttft", "itl", "request"]) showTime(name, times[name], before.times[name]);
  if (samples.length > 1) byId("rate").textContent = rateAt(samples.length - 1).toFixed(1);
  plot();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  ask(text);
});
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  byId("messages").replaceChildren();
  byId("prompt").focus();
});
poll();
