"use strict";
// Plotly charts in the style of the page. Colours are names of CSS variables: "@winner" is --winner.
const config = { displayModeBar: false, responsive: true };

// Replace every "@name" in a chart by the colour of the page.
function colour(value) {
  if (typeof value === "string" && value.startsWith("@")) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + value.slice(1)).trim();
  }
  if (Array.isArray(value)) return value.map(colour);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, colour(inner)]));
  }
  return value;
}

function axis(own) {
  const common = { gridcolor: "@rule", linecolor: "@soft", zeroline: false, automargin: true, separatethousands: true, ticks: "outside", tickcolor: "@rule" };
  return { ...common, ...own, ...(own?.title && { title: { standoff: 8, ...own.title } }) };
}

function layoutOf(figure) {
  const touch = matchMedia("(pointer: coarse)").matches;
  const own = figure.layout;
  return colour({
    height: 340, margin: { l: 56, r: 16, t: 12 + 16 * (own.meta?.above ?? 0), b: own.xaxis?.title ? 46 : 30 }, hovermode: "closest", dragmode: touch ? false : "zoom",
    paper_bgcolor: "@card", plot_bgcolor: "@card", font: { family: "@font", size: 12, color: "@ink" },
    hoverlabel: { align: "left", bgcolor: "@card", bordercolor: "@soft", font: { color: "@ink" }, namelength: -1 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, ...own.legend },
    ...Object.fromEntries(Object.entries(own).filter(([key]) => key !== "legend")),
    xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
  });
}
