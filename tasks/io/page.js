"use strict";
// The data of the page is text in a script element; nothing of it is ever parsed as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const chart = document.getElementById("chart");
const tree = document.getElementById("tree");
const ledger = document.getElementById("ledger");
const place = document.getElementById("place");
const byId = new Map(data.nodes.map((n) => [n.id, n]));
const items = new Map();
const config = { displaylogo: false, responsive: true, displayModeBar: false };
// The root with most below it first: amounts of two currencies cannot be compared.
const roots = data.nodes.filter((n) => !n.parent);
const below = (node) => node.children.reduce((sum, id) => sum + 1 + below(byId.get(id)), 0);
let current = roots.length ? roots.reduce((a, b) => (below(b) > below(a) ? b : a)).id : "";

function amount(node) {
  return node.amounts[ledger.value] === null ? "" : node.amounts[ledger.value];
}

function path(node) {
  const names = [];
  for (let n = node; n; n = byId.get(n.parent)) names.unshift(n.name);
  return names.join(" / ");
}

function show(id, focus) {
  current = id;
  const node = byId.get(id);
  for (const [key, item] of items) item.setAttribute("aria-selected", String(key === id));
  for (let n = byId.get(node.parent); n; n = byId.get(n.parent)) {
    if (items.has(n.id)) open(items.get(n.id), true);
  }
  place.textContent = path(node) + ": " + (amount(node) || "nothing") + " " + node.currency;
  const root = node.currency + "|" + ledger.value;
  const figure = data.figures[root];
  const known = figure.data[0].ids;
  let level = node;
  while (level && !known.includes(level.id)) level = byId.get(level.parent);
  const trace = Object.assign({}, figure.data[0], { level: level ? level.id : "" });
  Plotly.react(chart, [trace], figure.layout, config);
  if (focus && items.has(id)) items.get(id).focus();
}

function open(item, yes) {
  if (!item.hasAttribute("aria-expanded")) return;
  item.setAttribute("aria-expanded", String(yes));
  let group = item.querySelector(":scope > ul");
  if (yes && !group) {
    group = document.createElement("ul");
    group.setAttribute("role", "group");
    for (const child of byId.get(item.dataset.id).children) group.append(branch(byId.get(child)));
    item.append(group);
  }
  if (group) group.hidden = !yes;
}

function branch(node) {
  const item = document.createElement("li");
  item.setAttribute("role", "treeitem");
  item.setAttribute("aria-selected", "false");
  item.tabIndex = -1;
  item.dataset.id = node.id;
  if (node.children.length) item.setAttribute("aria-expanded", "false");
  const row = document.createElement("div");
  row.className = "row";
  for (const [kind, text] of [["name", node.name], ["kind", node.kind], ["amount", amount(node)]]) {
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = text;
    row.append(span);
  }
  item.append(row);
  items.set(node.id, item);
  return item;
}

function visible() {
  return [...tree.querySelectorAll("[role=treeitem]")].filter((i) => i.offsetParent !== null);
}

tree.addEventListener("click", (event) => {
  const item = event.target.closest("[role=treeitem]");
  if (!item) return;
  open(item, item.getAttribute("aria-expanded") === "false");
  show(item.dataset.id, true);
});

tree.addEventListener("keydown", (event) => {
  const item = event.target.closest("[role=treeitem]");
  if (!item) return;
  const all = visible();
  const at = all.indexOf(item);
  const go = { ArrowDown: all[at + 1], ArrowUp: all[at - 1], Home: all[0], End: all[all.length - 1] }[event.key];
  if (go) {
    go.focus();
  } else if (event.key === "ArrowRight") {
    if (item.getAttribute("aria-expanded") === "false") open(item, true);
    else if (item.querySelector("[role=treeitem]")) item.querySelector("[role=treeitem]").focus();
  } else if (event.key === "ArrowLeft") {
    if (item.getAttribute("aria-expanded") === "true") open(item, false);
    else if (item.parentElement.closest("[role=treeitem]")) item.parentElement.closest("[role=treeitem]").focus();
  } else if (event.key === "Enter" || event.key === " ") {
    open(item, true);
    show(item.dataset.id, true);
  } else {
    return;
  }
  event.preventDefault();
});

tree.addEventListener("focusin", (event) => {
  for (const item of items.values()) item.tabIndex = -1;
  event.target.tabIndex = 0;
});

document.getElementById("up").addEventListener("click", () => {
  const node = byId.get(current);
  if (node && node.parent) show(node.parent, true);
});

ledger.addEventListener("change", () => {
  for (const [id, item] of items) item.querySelector(":scope > .row .amount").textContent = amount(byId.get(id));
  if (data.nodes.length) show(current, false);
});

if (data.nodes.length) {
  for (const node of roots) tree.append(branch(node));
  items.get(current).tabIndex = 0;
  open(items.get(current), true);
  show(current, false);
  chart.on("plotly_click", (event) => {
    const id = event.points[0].id || byId.get(current).id;
    const node = byId.get(id);
    // A click on what fills the chart goes up, as the library has it.
    show(id === current && node.parent ? node.parent : id, false);
    return false;
  });
}
if (data.hours) Plotly.newPlot(document.getElementById("hours"), data.hours.data, data.hours.layout, config);
document.body.dataset.ready = "true";
