const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = matchMedia("(prefers-color-scheme: dark)");

function themed(layout) {
  const axis = { automargin: true, gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line") };
  return {
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: css("--font"), size: 13, color: css("--text") },
    colorway: [1, 2, 3, 4, 5, 6].map((n) => css(`--series-${n}`)),
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--text") } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    margin: { l: 8, r: 8, t: 32, b: 8 },
    bargap: 0.3,
    uniformtext: { mode: "hide", minsize: 10 },
  };
}

// Traces that name a series have its colour: points, and the line that was fitted to them.
function coloured(trace) {
  const series = trace.meta?.series;
  if (series === undefined) return trace;
  const color = css(`--series-${(series % 6) + 1}`);
  return { ...trace, marker: { ...trace.marker, color }, line: { ...trace.line, color } };
}

// What is folded has no size to be drawn in: it is drawn when it is unfolded.
const plots = [...document.querySelectorAll(".plot")];
const isFolded = (node) => node.closest("details:not([open])") !== null;

function draw(node) {
  const { data, layout } = JSON.parse(node.nextElementSibling.textContent);
  Plotly.react(node, data.map(coloured), themed(layout), { displayModeBar: false });
}

function drawAll() {
  plots.filter((node) => !isFolded(node)).forEach(draw);
}

function unfold() {
  const target = document.getElementById(location.hash.slice(1));
  target?.closest("details")?.setAttribute("open", "");
  target?.scrollIntoView();
}

drawAll();
unfold();
addEventListener("hashchange", unfold);
const drawInside = ({ target }) => plots.filter((node) => target.contains(node) && !isFolded(node)).forEach(draw);
document.addEventListener("toggle", drawInside, true); // it does not bubble
// plotly's own `responsive` follows the window, not the space that the page gives to the plot.
const resizes = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.data && !isFolded(target)) Plotly.Plots.resize(target);
});
plots.forEach((node) => resizes.observe(node));
isDark.addEventListener("change", drawAll);
// Paper is light.
addEventListener("beforeprint", () => { document.documentElement.dataset.print = ""; drawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.print; drawAll(); });
