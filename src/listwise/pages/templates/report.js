"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const two = data.models.length === 2;
const last = data.models.length - 1;
const SVG = "http://www.w3.org/2000/svg";
const SYMBOLS = { right: "✓", wrong: "✕", junk: "–" };
const MEANINGS = { right: "relevant", wrong: "irrelevant", junk: "junk" };
const byId = (id) => document.getElementById(id);
const byName = new Intl.Collator(undefined, { numeric: true }).compare;
let protocol = (data.protocols.length - 1) >> 1;
let shown = []; // queries in the order shown

// Names are not trusted: use them only as text or attributes, never as markup.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}
function draw(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const breakable = (name) => name.split(/(?<=[_./-])/).flatMap((part) => [part, make("wbr")]);

const ap = (query, model) => query.lists[model][protocol].ap;
const percent = (value) => (value === null ? "–" : (100 * value).toFixed(1));
function change(query) {
  return two && ap(query, 0) !== null ? ap(query, 1) - ap(query, 0) : null;
}
function changeText(query) {
  const points = Number(percent(ap(query, 1))) - Number(percent(ap(query, 0)));
  const size = Math.abs(points).toFixed(1);
  if (size === "0.0") return { text: "0.0", kind: "" };
  return points > 0 ? { text: "+" + size, kind: "gain" } : { text: "−" + size, kind: "loss" };
}

// Sorting: queries that the protocol does not count are last.
const lowest = (value) => (a, b) => {
  const [x, y] = [value(a), value(b)];
  if (x === null || y === null) return (x === null) - (y === null) || byName(a.name, b.name);
  return x - y || byName(a.name, b.name);
};
const negative = (value) => (query) => (value(query) === null ? null : -value(query));
const size = (query) => (change(query) === null ? null : Math.abs(change(query)));
const orders = {};
function offer(key, label, compare) {
  orders[key] = compare;
  byId("sort").append(make("option", { value: key, textContent: label }));
}
for (let model = last; model >= 0; model--) {
  const of = two ? ": " + data.models[model] : "";
  const value = (query) => ap(query, model);
  offer("worst" + model, "Lowest AP" + of, lowest(value));
  offer("best" + model, "Highest AP" + of, lowest(negative(value)));
}
if (two) {
  offer("difference", "Largest difference", lowest(negative(size)));
  offer("gain", "Largest gain", lowest(negative(change)));
  offer("loss", "Largest loss", lowest(change));
}
offer("name", "Name", (a, b) => byName(a.name, b.name));

// Cards: the lists of a card are built when it comes close to the visible area.
const near = new IntersectionObserver(
  (entries) => entries.forEach((entry) => entry.isIntersecting && fill(entry.target.query)),
  { rootMargin: "900px 0px" },
);
data.queries.forEach((query, index) => {
  query.id = "query-" + index;
  const link = make("a", { href: "#" + query.id, textContent: query.name });
  query.figures = make("span", { className: "ap" });
  query.body = make("div", { className: "body" });
  query.card = make(
    "article",
    { id: query.id, className: two ? "query two" : "query", tabIndex: -1 },
    make("header", {}, make("h3", {}, link), query.figures),
    query.body,
  );
  query.card.query = query;
  query.card.setAttribute("aria-label", query.name);
});

function head(query) {
  if (ap(query, last) === null) {
    query.figures.replaceChildren(make("small", { textContent: "not counted: no positives" }));
    return;
  }
  const parts = [make("small", { textContent: "AP " })];
  if (two) parts.push(percent(ap(query, 0)), " → ");
  parts.push(make("b", { textContent: percent(ap(query, last)) }));
  if (two) {
    const { text, kind } = changeText(query);
    parts.push(make("span", { className: "delta " + kind, textContent: text }));
  }
  query.figures.replaceChildren(...parts);
}

function photo(place, alt) {
  const source = data.photos[place];
  if (source === null) return make("span", { textContent: "photo cannot be read" });
  return make("img", { src: source, alt, decoding: "async" });
}

// The large view of a photo beside its query.
const large = make("dialog", { className: "large", ariaLabel: "Enlarged photos" });
large.addEventListener("click", () => large.close());
function enlarge(...shown) {
  const figures = shown.map(([place, caption]) =>
    make("figure", {}, photo(place, caption), make("figcaption", {}, ...breakable(caption))),
  );
  const close = make("button", { type: "button", className: "close", textContent: "✕", ariaLabel: "Close" });
  large.replaceChildren(...figures, close);
  document.body.append(large);
  large.showModal();
}
function enlarging(element, ...shown) {
  const button = Object.assign(element, { type: "button", title: "Enlarge" });
  button.addEventListener("click", () => enlarge(...shown));
  return button;
}

function fill(query) {
  near.unobserve(query.card);
  if (query.filled === protocol) return;
  query.filled = protocol;
  const frame = make("button", { className: "frame" }, photo(query.photo, "query " + query.name));
  enlarging(frame, [query.photo, query.name]);
  if (query.box !== null && data.photos[query.photo] !== null) {
    const [left, top, right, bottom] = query.box.map((edge) => 100 * edge);
    const box = make("div", { className: "box" });
    box.style.left = left + "%";
    box.style.top = top + "%";
    box.style.width = right - left + "%";
    box.style.height = bottom - top + "%";
    frame.append(box);
  }
  const positives = query.lists[last][protocol].positives;
  const caption = positives + (positives === 1 ? " positive" : " positives") + " in the database";
  const queryPhoto = make(
    "figure",
    { className: "query-photo" },
    frame,
    make("figcaption", { textContent: caption }),
  );
  const rows = make("div", { className: "rows" });
  data.models.forEach((name, model) => rows.append(row(query, name, model)));
  query.body.replaceChildren(queryPhoto, rows);
}

function row(query, name, model) {
  const list = query.lists[model][protocol];
  const counted = list.entries.filter((entry) => entry[3] !== null).length;
  let summary = list.found + " of the first " + counted + " relevant";
  if (list.hidden) summary += ", " + list.hidden + " more junk photos not shown";
  const title = make("span", {}, make("i", { className: "swatch model" + model }), name);
  const others = two ? new Set(query.lists[1 - model][protocol].entries.map((e) => e[0])) : null;
  const tiles = make("ol", { className: "tiles" });
  for (const entry of list.entries) tiles.append(tile(query, entry, others));
  return make(
    "div",
    {},
    make("div", { className: "row-head" }, title, make("span", { textContent: summary })),
    tiles,
  );
}

function tile(query, [place, score, mark, rank, points], others) {
  const name = data.names[place];
  const only = others !== null && mark === "right" && !others.has(place);
  const meaning = MEANINGS[mark] + (only ? ", found only by this model" : "");
  const thumb = make(
    "button",
    { className: "thumb" },
    photo(place, name + ", " + meaning),
    make("i", { className: "chip " + mark, textContent: SYMBOLS[mark], ariaHidden: "true" }),
  );
  if (only) {
    thumb.append(make("i", { className: "chip only", textContent: "★", ariaHidden: "true" }));
  }
  const value = score === null ? "" : score.toFixed(3);
  enlarging(thumb, [query.photo, query.name], [place, `${name}: ${meaning}, ${value}`]);
  const item = make("li", { className: "tile " + mark, title: `${name}\n${meaning} ${value}` }, thumb);
  const number = make("b", { textContent: rank === null ? "junk" : rank });
  const under = make("div", { className: "under" }, number);
  item.append(under);
  if (points !== undefined) item.append(pointsUnder(query, place, mark, data.matches[points]));
  if (rank !== null) {
    under.append(make("span", { textContent: value }));
    item.append(make("div", { className: "label" }, ...breakable(name)));
  }
  return item;
}

// Filter, sort and show the queries.
function matches(query) {
  return query.name.toLowerCase().includes(byId("filter").value.trim().toLowerCase());
}
function arrange() {
  shown = data.queries.filter(matches);
  shown.sort(orders[byId("sort").value]);
  byId("queries").replaceChildren(...shown.map((query) => query.card));
  byId("count").textContent = shown.length + " of " + data.queries.length + " queries";
  byId("nothing").hidden = shown.length > 0;
  for (const query of shown) {
    head(query);
    near.unobserve(query.card);
    if (query.filled !== protocol) near.observe(query.card);
  }
  drawChart();
}

function go(query) {
  if (!shown.includes(query)) {
    byId("filter").value = "";
    arrange();
  }
  const place = shown.indexOf(query);
  shown.slice(Math.max(0, place - 3), place + 3).forEach(fill);
  document.querySelector(".query.target")?.classList.remove("target");
  query.card.classList.add("target");
  query.card.scrollIntoView();
  query.card.focus({ preventScroll: true });
  history.replaceState(null, "", "#" + query.id);
}

function goToHash() {
  const query = data.queries.find((candidate) => "#" + candidate.id === location.hash);
  if (query) go(query);
}

// The chart: all counted queries, worst to best; also those without a list in this report.
const charted = data.chart.names.map((name, place) => ({
  name,
  lists: data.chart.ap.map((model) => model.map((values) => ({ ap: values[place] }))),
}));
data.queries.forEach((query, index) => (charted[data.chart.places[index]] = query));
const chart = byId("chart");
function key() {
  if (!two) return ["Point at a query to see its name; click or tap it to open its list."];
  return data.models.map((name, model) =>
    make("span", { className: "model" }, make("i", { className: "swatch model" + model }), name),
  );
}
// Thousands of queries: one path per model, since as many elements would be slow.
function denseChart(columns, x, y, bottom) {
  const at = columns.map((query, column) => [x(column).toFixed(1), y(ap(query, last)).toFixed(1)]);
  if (!two) {
    const area = at.map(([center, end]) => `L${center} ${end}`).join("");
    const [from, to] = [at[0][0], at[at.length - 1][0]];
    return [draw("path", { class: "bar", d: `M${from} ${bottom}${area}L${to} ${bottom}z` })];
  }
  const dots = columns.map((query, column) => {
    const value = ap(query, 0);
    return value === null ? "" : `M${x(column).toFixed(1)} ${y(value).toFixed(1)}h0`;
  });
  const line = "M" + at.map((place) => place.join(" ")).join("L");
  return [
    draw("path", { class: "cloud", d: dots.join("") }),
    draw("path", { class: "curve model1", d: line }),
  ];
}
let columns = [];
let chosen = -1;
function drawChart() {
  const style = getComputedStyle(chart);
  const width = chart.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const [height, left, top, bottom] = [210, 30, 8, 200];
  columns = charted.filter((query) => ap(query, last) !== null && matches(query));
  columns.sort(lowest((query) => ap(query, last)));
  const step = (width - left - 4) / Math.max(1, columns.length);
  const x = (column) => left + (column + 0.5) * step;
  const y = (value) => bottom - value * (bottom - top);
  const picture = draw("svg", { width, height, "aria-hidden": "true" });
  for (let value = 0; value <= 100; value += 25) {
    const level = y(value / 100);
    picture.append(draw("path", { class: "grid", d: `M${left} ${level}H${width}` }));
    const text = draw("text", { x: left - 7, y: level + 4, "text-anchor": "end" });
    text.textContent = value;
    picture.append(text);
  }
  const band = draw("rect", { class: "band", y: top, width: Math.max(step, 4), height: bottom - top });
  band.setAttribute("visibility", "hidden");
  picture.append(band);
  const dense = step < 4;
  if (dense) picture.append(...denseChart(columns, x, y, bottom));
  else columns.forEach((query, column) => {
    const [center, end] = [x(column), y(ap(query, last))];
    if (!two) {
      const bar = Math.min(24, Math.max(1, step * 0.72));
      const tall = Math.max(1, bottom - end);
      const at = { x: center - bar / 2, y: bottom - tall, width: bar, height: tall };
      picture.append(draw("rect", { class: "bar", ...at }));
      return;
    }
    const r = Math.min(5, Math.max(2, step * 0.34));
    const start = y(ap(query, 0));
    const diamond = `M${center} ${end - r * 1.3}l${r * 1.3} ${r * 1.3}l${-r * 1.3} ${r * 1.3}l${-r * 1.3} ${-r * 1.3}z`;
    picture.append(
      draw("path", { class: "stem", d: `M${center} ${start}V${end}` }),
      draw("circle", { class: "dot", cx: center, cy: start, r: r * 0.85 }),
      draw("path", { class: "dot model1", d: diamond }),
    );
  });
  chart.replaceChildren(picture);
  chart.choose = (column) => {
    chosen = Math.min(Math.max(column, 0), columns.length - 1);
    if (chosen < 0) return;
    band.setAttribute("x", x(chosen) - Math.max(step, 4) / 2);
    band.setAttribute("visibility", "visible");
    const query = columns[chosen];
    const before = two ? percent(ap(query, 0)) + " → " : "";
    const name = make("b", { textContent: query.name });
    const without = query.card ? "" : " (no list in this report)";
    byId("readout").replaceChildren(name, " AP " + before + percent(ap(query, last)) + without);
  };
  chart.columnAt = (event) =>
    Math.floor((event.clientX - picture.getBoundingClientRect().left - left) / step);
  chosen = -1;
  byId("readout").replaceChildren(...key());
}
chart.addEventListener("pointermove", (event) => chart.choose(chart.columnAt(event)));
chart.addEventListener("click", (event) => {
  chart.choose(chart.columnAt(event));
  if (chosen >= 0 && columns[chosen].card) go(columns[chosen]);
});
chart.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: columns.length - 1 };
  if (event.key in steps) chart.choose(steps[event.key]);
  else if (event.key === "Enter" && chosen >= 0 && columns[chosen].card) go(columns[chosen]);
  else return;
  event.preventDefault();
});

// The controls.
data.protocols.forEach((name, index) => {
  const input = make("input", { type: "radio", name: "protocol", value: index, checked: index === protocol });
  input.addEventListener("change", () => {
    protocol = index;
    arrange();
  });
  byId("protocols").append(make("label", {}, input, name));
});
byId("protocols").hidden = data.protocols.length === 1;
byId("only-key").hidden = !two;
byId("junk-key").hidden = !data.queries.some((query) =>
  query.lists.flat().some((list) => list.entries.some((entry) => entry[2] === "junk")),
);
byId("sort").addEventListener("change", arrange);
byId("filter").addEventListener("input", arrange);
byId("tools").addEventListener("submit", (event) => event.preventDefault());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input[type=search], select");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    byId("filter").focus();
  } else if ((event.key === "j" || event.key === "k") && !typing && shown.length) {
    const card = document.activeElement.closest(".query");
    const place = card ? shown.indexOf(card.query) : -1;
    const next = event.key === "j" ? place + 1 : Math.max(place, 1) - 1;
    go(shown[Math.min(next, shown.length - 1)]);
  }
});
addEventListener("hashchange", goToHash);
addEventListener("beforeprint", () => shown.forEach(fill));
arrange();
new ResizeObserver(drawChart).observe(chart);
goToHash();
