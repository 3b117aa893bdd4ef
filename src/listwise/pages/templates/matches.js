"use strict";
// Matching points: their number below each photo, and a dialog that draws them. Only reports with
// spatial verification contain this part.
const SPACE = 20; // pixels between the two photos
let viewer = null; // the dialog, created on first use
let scene = null; // what the dialog shows: both photos, the box of the query, the points

function pointsUnder(query, place, mark, [count, points]) {
  const unit = count === 1 ? " point" : " points";
  const text = [String(count), make("span", { textContent: unit })];
  const seen = [query.photo, place].every((number) => data.photos[number] !== null);
  if (!points.length || !seen) return make("div", { className: "points" }, ...text);
  const button = make("button", { className: "points", type: "button" }, ...text);
  button.setAttribute("aria-label", `Show ${count + unit} that match in ${data.names[place]}`);
  button.addEventListener("click", () => openViewer(query, place, mark, count, points));
  return button;
}

async function openViewer(query, place, mark, count, points) {
  viewer ??= makeViewer();
  const chip = make("i", { className: "chip " + mark, textContent: SYMBOLS[mark], ariaHidden: "true" });
  const drawn = points.length / 4;
  const some = drawn < count ? ` (${drawn} shown)` : "";
  viewer.heading.replaceChildren(...breakable(query.name), " → ", ...breakable(data.names[place]));
  viewer.summary.replaceChildren(chip, MEANINGS[mark], `, ${count} matching ${count === 1 ? "point" : "points"}${some}`);
  viewer.showModal();
  const pictures = [query.photo, place].map((number) => make("img", { src: data.photos[number] }));
  const mine = { query, name: data.names[place], pictures, points };
  scene = mine;
  await Promise.all(pictures.map((picture) => picture.decode()));
  if (scene === mine) drawScene();
}

function makeViewer() {
  const close = make("button", { type: "button", className: "close", textContent: "✕", ariaLabel: "Close" });
  const heading = make("h3", { id: "matches-heading" });
  const summary = make("p", {});
  const view = make("div", { className: "view" });
  const inside = make("div", { className: "inside" }, make("header", {}, heading, summary, close), view);
  const dialog = make("dialog", { className: "matches" }, inside);
  dialog.setAttribute("aria-labelledby", heading.id);
  Object.assign(dialog, { heading, summary, view });
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // click outside
  dialog.addEventListener("close", () => {
    scene = null;
    view.replaceChildren();
  });
  addEventListener("resize", () => view.firstChild && drawScene());
  document.body.append(dialog);
  return dialog;
}

// Lay out two photos: side by side with equal height, or stacked with equal width.
function layOut(pictures, stacked, room) {
  const lengths = pictures.map(({ naturalWidth: w, naturalHeight: h }) => (stacked ? h / w : w / h));
  const [across, along] = stacked ? [room.width, room.height] : [room.height, room.width];
  const unit = Math.max(40, Math.min(across, (along - SPACE) / (lengths[0] + lengths[1])));
  const frames = lengths.map((length, second) => {
    const start = second ? unit * lengths[0] + SPACE : 0;
    return stacked
      ? { x: 0, y: start, width: unit, height: unit * length }
      : { x: start, y: 0, width: unit * length, height: unit };
  });
  return { stacked, frames, area: unit ** 2 * (lengths[0] + lengths[1]) };
}

function drawScene() {
  const { query, name, pictures, points } = scene;
  viewer.view.replaceChildren();
  const around = viewer.offsetHeight - viewer.view.clientHeight;
  const room = { width: viewer.view.clientWidth, height: innerHeight - around - 24 };
  const [beside, below] = [false, true].map((stacked) => layOut(pictures, stacked, room));
  const { stacked, frames } = below.area > beside.area ? below : beside;
  const [first, second] = frames;
  const picture = draw("svg", {
    width: Math.max(first.width, second.x + second.width),
    height: Math.max(first.height, second.y + second.height),
    role: "img",
    "aria-label": `${query.name} and ${name}, with lines between ${points.length / 4} matching points`,
  });
  pictures.forEach(({ src }, side) =>
    picture.append(draw("image", { href: src, preserveAspectRatio: "none", ...frames[side] })),
  );
  if (query.box !== null) {
    const [left, top, right, bottom] = query.box;
    const x = left * first.width;
    const y = top * first.height;
    const size = { width: (right - left) * first.width, height: (bottom - top) * first.height };
    for (const part of ["edge", "part"]) picture.append(draw("rect", { class: part, x, y, ...size }));
  }
  // Colors vary along the query, so that neighboring points have similar colors.
  const rows = [];
  for (let at = 0; at < points.length; at += 4) rows.push(points.slice(at, at + 4));
  const side = stacked ? 0 : 1;
  rows.sort((a, b) => a[side] - b[side]);
  const paths = [];
  const lines = draw("g", { class: "lines" });
  const dots = draw("g", { class: "dots" });
  rows.forEach((row, number) => {
    const color = `hsl(${(300 * number) / Math.max(1, rows.length - 1)} 90% 62%)`;
    const [qx, qy, x, y] = row.map((part) => part / 1000);
    const start = [first.x + qx * first.width, first.y + qy * first.height];
    const end = [second.x + x * second.width, second.y + y * second.height];
    const d = `M${start}L${end}`;
    paths.push(d);
    lines.append(draw("path", { d, stroke: color }));
    for (const [cx, cy] of [start, end]) dots.append(draw("circle", { cx, cy, r: 3.2, fill: color }));
  });
  picture.append(draw("path", { class: "shade", d: paths.join("") }), lines, dots);
  viewer.view.replaceChildren(picture);
}

{
  const sample = make("span", { className: "points", textContent: "9 points" });
  const legend = document.querySelector(".legend.marks");
  const meaning = legend.dataset.points ?? "that match the query: click the number to see them";
  legend.append(make("li", {}, sample, meaning));
}
