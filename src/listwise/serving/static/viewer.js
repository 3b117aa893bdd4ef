// The large view of a result: the photo, its attributes, and its matches with the query.

import * as api from "./api.js";
import { byId, count, make } from "./dom.js";
import { nameOf, percent } from "./grid.js";
import { showMark } from "./marks.js";
import { drawMatches } from "./matches.js";
import { setPicture, shownAt } from "./pictures.js";

export class Viewer {
  /**
   * @param {{onPick, onAdd, onRemove, onClosed, onMark, markOf}} acts each called with the item shown,
   *   `onMark` also with the mark and the place; `markOf` is the mark of a key.
   */
  constructor(acts) {
    this.acts = acts;
    this.dialog = byId("viewer");
    this.scene = byId("viewer-scene");
    this.showMatches = true;
    const on = (id, act) => byId(id).addEventListener("click", act);
    on("viewer-close", () => this.dialog.close());
    on("viewer-before", () => this.step(-1));
    on("viewer-after", () => this.step(1));
    on("viewer-pick", () => this.leaveFor(acts.onPick));
    on("viewer-add", () => this.leaveFor(acts.onAdd));
    on("viewer-remove", () => this.confirm(true));
    on("viewer-keep", () => this.confirm(false));
    on("viewer-really", () => this.leaveFor(acts.onRemove));
    on("viewer-same", () => this.mark(true));
    on("viewer-different", () => this.mark(false));
    on("viewer-matches", () => {
      this.showMatches = !this.showMatches;
      this.render();
    });
    // On the document: a button that is disabled at either end loses the focus.
    document.addEventListener("keydown", (event) => {
      if (!this.dialog.open || event.target.matches("input")) return;
      if (event.altKey || event.ctrlKey || event.metaKey) return; // shortcuts of the browser
      if (event.key === "ArrowLeft") this.step(-1);
      if (event.key === "ArrowRight") this.step(1);
      if (event.repeat) return; // the same mark again would remove it
      const letter = event.key.toLowerCase();
      if (letter === "s") this.mark(true);
      if (letter === "d") this.mark(false);
    });
    this.dialog.addEventListener("close", () => {
      this.scene.replaceChildren();
      if (this.returning) acts.onClosed(this.item);
    });
    this.listenForSwipes();
    window.addEventListener("resize", () => this.dialog.open && this.render());
  }

  get item() {
    return this.items[this.at];
  }

  /**
   * Open the view.
   * @param {Object[]} items entries or results, and `at` which of them
   * @param {Object[]} frames the examples of the query: url, width, height, unshown
   */
  open(items, at, frames, canWrite) {
    Object.assign(this, { items, at, frames, canWrite, returning: true });
    this.dialog.showModal();
    this.render();
  }

  step(way) {
    const next = this.at + way;
    if (next < 0 || next >= this.items.length) return;
    this.at = next;
    this.render();
  }

  /** Mark the photo, if it is the result of a search. */
  mark(same) {
    if (!this.frames.length) return;
    this.acts.onMark(this.item, same, this.at);
    this.showMark();
  }

  showMark() {
    const area = byId("viewer-verdict");
    area.hidden = !this.frames.length;
    showMark(area, this.acts.markOf(this.item.key));
  }

  render() {
    const { item } = this;
    const name = nameOf(item);
    byId("viewer-name").textContent = name;
    byId("viewer-before").disabled = this.at === 0;
    byId("viewer-after").disabled = this.at === this.items.length - 1;
    byId("viewer-place").textContent = `${this.at + 1} of ${count(this.items.length, "photo")}`;
    const address = api.photo(item.key);
    const link = byId("viewer-link");
    link.href = address;
    shownAt(address).then((url) => item === this.item && (link.href = url), () => {});
    byId("viewer-add").hidden = !this.frames.length;
    byId("viewer-remove").hidden = !this.canWrite;
    this.confirm(false);
    this.showMark();

    const query = this.frames[item.photo ?? 0];
    const matched = Boolean(item.matches?.length && query && !query.unshown);
    const toggle = byId("viewer-matches");
    toggle.hidden = !matched;
    toggle.setAttribute("aria-pressed", String(this.showMatches));
    byId("viewer-facts").replaceChildren(...facts(item).flatMap(fact));
    // Last, since the elements above determine the available space.
    this.scene.replaceChildren(
      matched && this.showMatches ? this.matchedScene(query, item, name) : photoScene(item, name),
    );
  }

  matchedScene(query, item, name) {
    const result = { url: api.photo(item.key), width: item.width, height: item.height };
    const drawing = drawMatches(query, result, item.matches, this.scene.getBoundingClientRect());
    const points = count(item.matches.length, "matched point");
    drawing.setAttribute("aria-label", `The query and ${name}, joined by ${points}`);
    return drawing;
  }

  /** Close the view without returning to the tile it was opened from. */
  leave() {
    this.returning = false;
    this.dialog.close();
  }

  leaveFor(act) {
    this.leave();
    act(this.item);
  }

  confirm(open) {
    byId("viewer-sure").hidden = !open;
    byId("viewer-actions").hidden = open;
    if (open) byId("viewer-keep").focus();
  }

  listenForSwipes() {
    let start = null;
    this.scene.addEventListener("pointerdown", ({ clientX, pointerType }) => {
      start = pointerType === "touch" ? clientX : null;
    });
    this.scene.addEventListener("pointerup", ({ clientX }) => {
      if (start !== null && Math.abs(clientX - start) > 50) this.step(clientX < start ? 1 : -1);
      start = null;
    });
  }
}

/** The photo, or its thumbnail if the file is missing. */
function photoScene(item, name) {
  const image = make("img", {
    alt: name,
    draggable: "false",
    on: { error: () => setPicture(image, api.thumbnail(item.key)) },
  });
  setPicture(image, api.photo(item.key));
  const ratio = item.width / item.height;
  const frame = make("div", { class: "framed", vars: { "--ratio": ratio } }, image);
  if (item.box) {
    const [x0, y0, x1, y1] = item.box;
    const mark = make("div", { class: "part", title: "The part of the photo that was indexed" });
    const percent = (value, all) => `${(100 * value) / all}%`;
    mark.style.left = percent(x0, item.width);
    mark.style.top = percent(y0, item.height);
    mark.style.width = percent(x1 - x0, item.width);
    mark.style.height = percent(y1 - y0, item.height);
    frame.append(mark);
  }
  return frame;
}

function facts(item) {
  const known = [];
  if (item.score !== undefined) known.push(["Score", item.score.toFixed(4)]);
  if ((item.probability ?? null) !== null) known.push(["Same thing", `${percent(item)} likely`]);
  if (item.inliers !== undefined && item.inliers !== null) {
    const drawn = item.matches?.length ?? 0;
    const some = drawn < item.inliers ? ` (${drawn} drawn)` : "";
    known.push(["Matched points", item.inliers + some]);
  }
  known.push(["Size", `${item.width} × ${item.height}`], ["Id", item.id]);
  return [...known, ...Object.entries(item.attributes ?? {})];
}

const fact = ([name, value]) => [make("dt", {}, name), make("dd", {}, value)];
