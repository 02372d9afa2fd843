"use strict";
// Glue: draws the chosen view of each figure in the colours of the page, and keeps the legend, the choices and the tables.
const views = JSON.parse(document.getElementById("views").textContent);
const dark = JSON.parse(document.getElementById("dark").textContent);
const system = matchMedia("(prefers-color-scheme: dark)");
const TOOLS = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]; // named one by one: plotly's own set has one that sends the chart to a server
const hidden = new Set();
const figures = [...document.querySelectorAll("figure")];
let printing = false;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return !printing && (chosen ? chosen === "dark" : system.matches);
}

function inTheme(value) {
  if (typeof value === "string") return isDark() ? dark[value] ?? value : value;
  if (Array.isArray(value)) return value.map(inTheme);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, inTheme(v)]));
  return value;
}

function chosen(figure) {
  return [...figure.querySelectorAll(".choices > *")].map((choice) => {
    const slider = choice.querySelector("input[type=range]");
    if (!slider) return (choice.querySelector("input:checked") ?? choice.querySelector("select")).value;
    const value = slider.dataset.values.split("|")[slider.value];
    choice.querySelector("output").textContent = value;
    slider.setAttribute("aria-valuetext", value);
    return value;
  }).join("|");
}

function draw(figure) {
  const plot = figure.querySelector(".plot");
  const view = inTheme(views[figure.id][chosen(figure)]);
  for (const trace of view.data) trace.visible = !hidden.has(trace.legendgroup);
  const coarse = matchMedia("(pointer: coarse)").matches || innerWidth < 640;
  view.layout.dragmode = coarse ? false : "zoom"; // a finger scrolls the page
  view.layout.width = plot.clientWidth;
  if (innerWidth < 640) view.layout.font = { ...view.layout.font, size: 11 };
  plot.style.minHeight = view.layout.height + "px";
  Plotly.react(plot, view.data, view.layout, { displaylogo: false, modeBarButtons: TOOLS });
}

function drawAll() { figures.forEach(draw); }

const button = document.getElementById("theme");
function nameTheme() { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Change to " + button.textContent.toLowerCase() + " colours"); }
function recolour() { nameTheme(); paintLegend(); drawAll(); }
button.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; recolour(); });
system.addEventListener("change", recolour);

const chips = [...document.querySelectorAll(".legend button")];
for (const chip of chips) for (const shape of chip.querySelectorAll("line, path")) for (const name of ["stroke", "fill"])
  if (shape.hasAttribute(name)) shape.dataset[name] = shape.getAttribute(name);
function paintLegend() {
  for (const chip of chips) for (const shape of chip.querySelectorAll("line, path"))
    for (const [name, colour] of Object.entries(shape.dataset)) shape.setAttribute(name, inTheme(colour));
}
for (const chip of chips) chip.addEventListener("click", () => {
  const group = chip.dataset.group, show = hidden.delete(group);
  if (!show) hidden.add(group);
  chip.setAttribute("aria-pressed", String(show));
  figures.filter((figure) => Object.values(views[figure.id]).some((view) => view.data.some((trace) => trace.legendgroup === group))).forEach(draw);
});
document.querySelector(".legend")?.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chips[(chips.indexOf(document.activeElement) + step + chips.length) % chips.length].focus();
});

for (const figure of figures) for (const input of figure.querySelectorAll(".choices input, .choices select")) input.addEventListener("input", () => draw(figure));

for (const table of document.querySelectorAll("table")) table.addEventListener("click", (event) => {
  const sort = event.target.closest(".sort");
  if (!sort) return;
  const head = sort.closest("th"), place = head.cellIndex, up = head.getAttribute("aria-sort") === "descending";
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (row) => Number(row.cells[place].dataset.value ?? -Infinity);
  const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * (value(a) - value(b)));
  table.tBodies[0].append(...rows);
});

let width = innerWidth, waiting;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (width !== innerWidth) { width = innerWidth; drawAll(); } }, 120); });
addEventListener("beforeprint", () => { printing = true; recolour(); });
addEventListener("afterprint", () => { printing = false; recolour(); });
recolour();
