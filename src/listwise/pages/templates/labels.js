// The page of labels: pictures, matching points and the filter.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const SYMBOLS = { right: "✓", wrong: "✕" };
const MEANINGS = { right: "kept", wrong: "dropped" };
const byId = (id) => document.getElementById(id);

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

function fill(tile) {
  const place = Number(tile.dataset.photo);
  const source = data.photos[place];
  const thumb = tile.querySelector(".thumb");
  if (source === null) thumb.append(make("span", { textContent: "photo cannot be read" }));
  else thumb.prepend(make("img", { src: source, alt: data.names[place], decoding: "async" }));
  if (tile.dataset.pair === undefined) return;
  const [one, two, inliers, points] = data.pairs[Number(tile.dataset.pair)];
  const query = { photo: one, name: data.names[one], box: null };
  thumb.after(pointsUnder(query, two, tile.dataset.mark, [inliers, points]));
}

// Pictures are added when they come close to the visible area.
const near = new IntersectionObserver(
  (entries) =>
    entries.forEach((entry) => {
      if (!entry.isIntersecting) return;
      near.unobserve(entry.target);
      fill(entry.target);
    }),
  { rootMargin: "900px 0px" },
);
document.querySelectorAll(".tile").forEach((tile) => near.observe(tile));

const cards = [...document.querySelectorAll("#classes .query")];
function filter() {
  const text = byId("filter").value.trim().toLowerCase();
  let shown = 0;
  for (const card of cards) {
    card.hidden = !card.dataset.name.toLowerCase().includes(text);
    shown += !card.hidden;
  }
  byId("nothing").hidden = shown > 0;
  byId("count").textContent = `${shown} of ${cards.length} classes`;
}
byId("filter").addEventListener("input", filter);
byId("tools").addEventListener("submit", (event) => event.preventDefault());
filter();
