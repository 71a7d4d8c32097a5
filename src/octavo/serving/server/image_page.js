"use strict";

const POLL_MS = 1000;
const byId = (id) => document.getElementById(id);
let running = null; // AbortController of the images that are drawn

function headers() {
  const key = byId("key").value;
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

function show(className, text) {
  byId("empty")?.remove();
  const message = document.createElement("div");
  message.className = className;
  message.textContent = text;
  byId("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function note(message, text, isBad) {
  const line = document.createElement("span");
  line.className = isBad ? "quiet bad" : "quiet";
  line.textContent = text;
  message.append(line);
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server says ${response.status}`;
  }
}

function question(prompt) {
  const asked = { prompt, n: Number(byId("count").value) || 1 };
  if (byId("steps").value) asked.num_inference_steps = Number(byId("steps").value);
  if (byId("seed").value) asked.seed = Number(byId("seed").value);
  if (byId("size").value) asked.size = byId("size").value;
  return asked;
}

async function ask(prompt) {
  const controller = new AbortController();
  setRunning(controller);
  show("message user", prompt);
  const message = show("message", "");
  try {
    const response = await fetch("v1/images/generations", {
      method: "POST",
      headers: headers(),
      signal: controller.signal,
      body: JSON.stringify(question(prompt)),
    });
    if (!response.ok) throw new Error(await failure(response));
    const answer = await response.json();
    for (const picture of answer.data) {
      const image = document.createElement("img");
      image.src = `data:image/png;base64,${picture.b64_json}`;
      image.alt = `${prompt}, seed ${picture.seed}`;
      image.className = "picture";
      message.append(image);
    }
    const seeds = answer.data.map((picture) => picture.seed).join(", ");
    note(message, `${answer.size}, seed ${seeds}, ${answer.seconds.toFixed(1)} s`, false);
    message.scrollIntoView({ block: "end" });
  } catch (error) {
    const isStopped = error.name === "AbortError";
    note(message, isStopped ? "stopped" : error.message, !isStopped);
  }
  setRunning(null);
  byId("prompt").focus();
}

function showStatus(text, isBad) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", isBad);
}

// What is in FP8; it stays the same while the server runs.
function showPrecision(precision) {
  const list = byId("precision");
  if (list.childElementCount) return;
  for (const [title, phrase] of Object.entries(precision)) {
    const fact = document.createElement("li");
    fact.textContent = `${title}: ${phrase}`;
    list.append(fact);
  }
}

function showNumbers(stats) {
  byId("model").textContent = stats.model;
  showPrecision(stats.precision);
  byId("open").textContent = stats.num_open;
  byId("waiting").textContent = `${stats.num_waiting} of them wait`;
  byId("images").textContent = stats.num_images;
  byId("mean").textContent = stats.mean_s === null ? "" : `${stats.mean_s.toFixed(2)} s for a request`;
}

async function poll() {
  if (!document.hidden) {
    try {
      const response = await fetch("stats", { headers: headers() });
      if (response.ok) {
        const stats = await response.json();
        showNumbers(stats);
        showStatus(stats.status === "ok" ? "ready" : stats.status, stats.status !== "ok");
      } else {
        showStatus(response.status === 401 ? "this server needs an API key" : await failure(response), true);
      }
    } catch {
      showStatus("the server does not answer", true);
    }
  }
  setTimeout(poll, POLL_MS);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (prompt && !running) ask(prompt);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("key").value = sessionStorage.getItem("octavo-key") ?? "";
byId("key").addEventListener("change", () => sessionStorage.setItem("octavo-key", byId("key").value));
poll();
