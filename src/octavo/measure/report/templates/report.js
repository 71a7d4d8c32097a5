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

function drawAll() {
  for (const node of document.querySelectorAll(".plot")) {
    const { data, layout } = JSON.parse(node.nextElementSibling.textContent);
    Plotly.react(node, data.map(coloured), themed(layout), { displayModeBar: false });
  }
}

drawAll();
// plotly's own `responsive` follows the window, not the space that the page gives to the plot.
const resizes = new ResizeObserver((entries) => entries.forEach((entry) => Plotly.Plots.resize(entry.target)));
document.querySelectorAll(".plot").forEach((node) => resizes.observe(node));
isDark.addEventListener("change", drawAll);
