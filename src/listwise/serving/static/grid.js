// Photos in rows of equal height; tiles are created when the user scrolls near them.

import * as api from "./api.js";
import { count, cut, icon, iconButton, make } from "./dom.js";
import { markButtons, showMark } from "./marks.js";
import { setLazily } from "./pictures.js";

const CHUNK = 60;
const AHEAD = "1200px"; // distance below the window at which tiles are created
const NARROWEST = 0.55; // width / height of a tile; other photos are cropped
const WIDEST = 2.4;
const FOLDERS = 4; // of a path, in a name
const RELIABLE = 7; // matched points; photos of different things rarely have as many
const LIKELY = 0.5; // probability that a result shows the same thing

/** The probability of a result: 0.934 -> "93%". */
export const percent = ({ probability }) => `${Math.round(100 * probability)}%`;

/** The end of the path of an entry with so many folders, or the original name of an added photo. */
function pathEnd({ id, attributes }, folders = 0) {
  if (attributes?.uploaded_as) return attributes.uploaded_as;
  return id.split("#")[0].split("/").slice(-1 - folders).join("/");
}

/** The name of an entry: that of its file, with folders if others in the view have the same name. */
export const nameOf = (item) => item.name ?? pathEnd(item);

/** Name entries so that their names differ, where their paths do. */
export function nameAll(items) {
  let alike = items;
  for (let folders = 0; alike.length && folders < FOLDERS; folders += 1) {
    const groups = Map.groupBy(alike, (item) => pathEnd(item, folders));
    for (const item of alike) item.name = pathEnd(item, folders);
    alike = [...groups.values()].filter(({ length }) => length > 1).flat();
  }
}

/** Width / height of what an entry's thumbnail shows. */
function ratioOf({ width, height, box }) {
  const ratio = box ? (box[2] - box[0]) / (box[3] - box[1]) : width / height;
  return Math.min(Math.max(ratio || 1, NARROWEST), WIDEST);
}

function picture(item, name) {
  const image = make("img", {
    alt: name,
    loading: "lazy",
    decoding: "async",
    draggable: "false",
    on: { error: () => image.replaceWith(make("span", { class: "missing" }, name)) },
  });
  setLazily(image, api.thumbnail(item.key));
  return image;
}

export class Grid {
  /**
   * @param {{onPick, onView, onAdd, onEnd, onMark, markOf}} acts each called with an item, `onView`
   *   with its place, `onEnd` when the user is near the end of the items, `onMark` with several
   *   items and the mark; `markOf` is the mark of a key.
   */
  constructor(list, { onPick, onView, onAdd = null, onEnd = () => {}, onMark = null, markOf }) {
    this.list = list;
    this.acts = { onPick, onView, onAdd, onEnd, onMark, markOf };
    this.items = [];
    this.images = new Map();
    this.end = make("li", { class: "end", "aria-hidden": "true" });
    this.watch = new IntersectionObserver(([seen]) => seen.isIntersecting && this.reach(), {
      rootMargin: `0px 0px ${AHEAD} 0px`,
    });
    list.addEventListener("keydown", (event) => this.press(event));
    list.addEventListener("focusin", ({ target }) => this.activate(target.closest(".tile")));
  }

  /** Show entries or results, the first `many` of them immediately. */
  show(items, many = CHUNK) {
    this.divider = null;
    this.watch.disconnect();
    this.items = items;
    nameAll(items);
    this.active = null;
    // Pictures that are shown again are not loaded again, so that they do not flicker.
    for (const tile of this.tiles) this.images.set(tile.dataset.key, tile.querySelector(".pick img"));
    this.list.replaceChildren(this.end);
    this.more(many);
    this.images.clear();
    this.watch.observe(this.end);
  }

  /** Show the marks of the photos, which have changed. */
  showMarks() {
    for (const tile of this.tiles) showMark(tile, this.acts.markOf(tile.dataset.key));
  }

  /** Number of tiles. */
  get shown() {
    return this.tiles.length;
  }

  get tiles() {
    return [...this.list.querySelectorAll(".tile")];
  }

  /** Add further items after those that are shown. */
  extend(items) {
    this.items.push(...items);
    nameAll(this.items);
    this.tiles.forEach((tile, at) => tile.querySelector("b").replaceChildren(cut(this.items[at].name)));
    this.more();
  }

  /** Draw a line after the last item that is likely to show the same thing. */
  divide() {
    const last = this.items.findLastIndex(({ probability }) => probability >= LIKELY);
    const known = this.items.some(({ probability }) => (probability ?? null) !== null);
    const text = last < 0 ? "Similar, but probably not the same" : "Only similar from here on";
    this.divider ??= make("li", { class: "divider" });
    this.divider.textContent = text;
    // Takes the rest of the row, so that a single photo does not become as wide as the page.
    this.rest ??= make("li", { class: "end", "aria-hidden": "true" });
    const tile = this.tiles[last + 1];
    if (known && tile) {
      tile.before(this.rest, this.divider);
    } else {
      this.rest.remove();
      this.divider.remove();
    }
  }

  /** The user is near the end. */
  reach() {
    if (this.shown < this.items.length) this.more();
    else this.acts.onEnd();
  }

  more(many = CHUNK) {
    const from = this.shown;
    const next = this.items.slice(from, from + many);
    this.end.before(...next.map((item) => this.tile(item)));
    this.divide();
    if (!this.active) this.activate(this.list.querySelector(".tile"));
    if (from) {
      // The end may still be visible, and an observer reports only changes.
      this.watch.unobserve(this.end);
      this.watch.observe(this.end);
    }
  }

  /** Remove an entry. */
  drop(key) {
    this.items = this.items.filter((item) => item.key !== key);
    const tile = this.list.querySelector(`[data-key="${key}"]`);
    if (tile === this.active) this.active = null;
    tile?.remove();
    this.divide();
    if (!this.active) this.activate(this.list.querySelector(".tile"));
  }

  /** Move the keyboard focus to the tile of an item. */
  focus(item) {
    this.focusAt(this.items.findIndex(({ key }) => key === item?.key));
  }

  focusAt(place) {
    if (place >= this.shown) this.more(place + 1 - this.shown);
    this.tiles[place]?.querySelector(".pick").focus();
  }

  /** Move the keyboard focus to the first photo without a mark from a place on. */
  focusUnmarked(place) {
    const free = this.items.findIndex(({ key }, at) => at >= place && this.acts.markOf(key) === undefined);
    this.focusAt(free < 0 ? Math.min(place, this.items.length - 1) : free);
  }

  /** Show results in another order; the keyboard focus stays where the user marked, or on its photo. */
  reorder(items, many) {
    const focused = this.list.contains(document.activeElement) && document.activeElement.closest(".tile");
    const key = focused ? focused.dataset.key : null;
    this.show(items, many);
    if (key === null) return;
    if (key === this.next?.key) this.focusUnmarked(this.next.place);
    else this.focus({ key });
  }

  /** Mark the photo at a place; with `range`, also the photos since the last one that was marked. */
  mark(at, same, { range = false, keys = false } = {}) {
    const { onMark, markOf } = this.acts;
    if (!onMark) return;
    const last = this.items.findIndex(({ key }) => key === this.lastMarked);
    const [from, to] = range ? [Math.min(at, Math.max(last, 0)), Math.max(at, last)] : [at, at];
    const items = this.items.slice(from, to + 1);
    const free = items.filter(({ key }) => markOf(key) === undefined);
    this.lastMarked = this.items[at].key;
    onMark(range && free.length ? free : [this.items[at]], same);
    if (markOf(this.lastMarked) === undefined) return;
    // The next photo to decide on, until the results come in their new order. The focus does not
    // follow the marked photo to the other end of the list, because the page would scroll there.
    if (keys) this.focusUnmarked(at);
    this.next = { key: this.active?.dataset.key, place: from };
  }

  tile(item) {
    const { onPick, onView, onAdd, onMark, markOf } = this.acts;
    const name = nameOf(item);
    const facts = [name];
    const marks = make("span", { class: "marks" });
    if (item.score !== undefined) {
      facts.push(`score ${item.score.toFixed(3)}`);
      if (item.probability !== null) facts.push(`${percent(item)} likely the same`);
      marks.append(make("span", { class: "score" }, item.score.toFixed(3)));
    }
    if (item.inliers >= RELIABLE) {
      facts.push(count(item.inliers, "matched point"));
      const title = count(item.inliers, "matched point");
      marks.append(make("span", { class: "points", title }, icon("points"), `${item.inliers}`));
    }
    const image = this.images.get(item.key) ?? picture(item, name);
    const label = `Enlarge ${facts.join(", ")}`;
    const pick = { type: "button", class: "pick", "aria-label": label, tabindex: "-1" };
    const attributes = Object.entries(item.attributes ?? {}).map(([key, value]) => `${key}: ${value}`);
    const place = () => this.items.indexOf(item);
    const mark = (same, { shiftKey, detail }) => this.mark(place(), same, { range: shiftKey, keys: !detail });
    const tile = make(
      "li",
      { class: "tile", data: { key: item.key }, vars: { "--ratio": ratioOf(item) } },
      make("button", { ...pick, on: { click: () => onView(place()) } }, image),
      make(
        "div",
        { class: "caption", "aria-hidden": "true" },
        make("b", {}, cut(name)),
        attributes.length ? make("span", {}, attributes.join(" · ")) : null,
      ),
      marks,
      make(
        "div",
        { class: "tools" },
        onAdd &&
          iconButton("plus", `Add ${name} as an example`, () => onAdd(item), { tabindex: "-1" }),
        iconButton("search", `Search with ${name}`, () => onPick(item), { tabindex: "-1" }),
      ),
      onMark && markButtons(name, mark),
    );
    if (onMark) showMark(tile, markOf(item.key));
    return tile;
  }

  /** Only one tile is in the tab order; arrow keys move between tiles. */
  activate(tile) {
    if (!tile || tile === this.active) return;
    for (const button of this.active?.querySelectorAll("button") ?? []) button.tabIndex = -1;
    for (const button of tile.querySelectorAll("button")) button.tabIndex = 0;
    this.active = tile;
  }

  press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const tiles = this.tiles;
    const at = tiles.indexOf(event.target.closest(".tile"));
    if (at < 0) return;
    const item = this.items[at];
    if (event.key === "f") return this.acts.onPick(item);
    if (event.key === "+") return this.acts.onAdd?.(item);
    const letter = event.key.toLowerCase();
    if (letter === "s" || letter === "d") {
      if (event.repeat) return; // each photo needs a decision
      return this.mark(at, letter === "s", { range: event.shiftKey, keys: true });
    }
    const goal = {
      ArrowLeft: () => at - 1,
      ArrowRight: () => at + 1,
      ArrowUp: () => this.beside(tiles, at, -1),
      ArrowDown: () => this.beside(tiles, at, 1),
      Home: () => 0,
      End: () => tiles.length - 1,
    }[event.key]?.();
    if (goal === undefined) return;
    event.preventDefault();
    tiles[goal]?.querySelector(".pick").focus();
  }

  /** The nearest tile in the row above (-1) or below (1). */
  beside(tiles, at, way) {
    const middle = (tile) => tile.offsetLeft + tile.offsetWidth / 2;
    const places = tiles.map((tile) => ({ y: tile.offsetTop, x: middle(tile) }));
    let best = -1;
    for (let i = at + way; i >= 0 && i < tiles.length; i += way) {
      if (places[i].y === places[at].y) continue;
      if (best >= 0 && places[i].y !== places[best].y) break;
      const gap = (j) => Math.abs(places[j].x - places[at].x);
      if (best < 0 || gap(i) < gap(best)) best = i;
    }
    return best;
  }
}
