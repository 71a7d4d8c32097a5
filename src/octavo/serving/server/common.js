"use strict";
// What the pages of both servers share; a page's own script follows, in the same file.

const POLL_MS = 1000;
const byId = (id) => document.getElementById(id);
let running = null; // AbortController of the answer that is on its way

function headers() {
  const key = byId("key").value;
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
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

function showStatus(text, isBad) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", isBad);
}

const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

// What is in FP8, and the bytes that it saves; both stay the same while the server runs.
function showPrecision(precision, saved) {
  const list = byId("precision");
  if (list.childElementCount) return;
  const total = Object.values(saved).reduce((sum, bytes) => sum + bytes, 0);
  byId("saved").textContent = total ? size(total) : "nothing";
  for (const [title, phrase] of Object.entries(precision)) {
    const fact = document.createElement("li");
    fact.textContent = `${title}: ${phrase}${saved[title] ? `; saves ${size(saved[title])}` : ""}`;
    list.append(fact);
  }
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
