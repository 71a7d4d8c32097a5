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

function showNumbers(stats) {
  byId("model").textContent = stats.model;
  showPrecision(stats.precision, stats.saved_bytes);
  byId("open").textContent = stats.num_open;
  byId("waiting").textContent = `${stats.num_waiting} of them wait`;
  byId("images").textContent = stats.num_images;
  byId("mean").textContent = stats.mean_s === null ? "" : `${stats.mean_s.toFixed(2)} s for a request`;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt").value.trim();
  if (prompt && !running) ask(prompt);
});
poll();
