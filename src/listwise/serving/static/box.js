// A box on a photo that the user draws, moves and resizes by mouse, touch or keyboard.

import { make } from "./dom.js";

const HANDLES = ["nw", "n", "ne", "e", "se", "s", "sw", "w"];
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SMALLEST = 0.04; // of the short side of the photo; a smaller box is a click
const STEP = 0.02; // of the long side of the photo, for one press of an arrow key
const REST = 350; // milliseconds without a key press until the box is final

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Boxes [x0, y0, x1, y1] in whole pixels of the upright photo, or null for the whole photo. */
export class BoxEditor {
  /**
   * @param {HTMLElement} stage contains only the photo
   * @param {(box: number[]|null) => void} onDone called when the user has changed the box
   */
  constructor(stage, readout, onDone) {
    this.stage = stage;
    this.readout = readout;
    this.onDone = onDone;
    this.frame = make("div", { class: "box", hidden: true });
    for (const at of HANDLES) this.frame.append(make("span", { class: "handle", data: { at } }));
    stage.append(this.frame);
    stage.addEventListener("pointerdown", (event) => this.grab(event));
    stage.addEventListener("pointermove", (event) => this.drag(event));
    stage.addEventListener("pointerup", () => this.release());
    stage.addEventListener("pointercancel", () => this.cancel());
    stage.addEventListener("keydown", (event) => this.press(event));
    stage.addEventListener("blur", () => this.settle());
    this.show(1, 1, null, false);
  }

  /** Show the box of a photo; it can be changed if `active`. */
  show(width, height, box, active = true) {
    clearTimeout(this.timer);
    this.timer = null;
    this.held = null;
    this.width = width;
    this.height = height;
    this.active = active;
    this.stage.classList.toggle("drawable", active);
    this.done = box;
    this.put(box);
  }

  put(box) {
    this.box = box;
    this.frame.hidden = box === null;
    this.stage.dataset.box = box === null ? "" : box.join(",");
    if (box === null) {
      this.readout.textContent = "";
      return;
    }
    const [x0, y0, x1, y1] = box;
    const place = { left: x0 / this.width, top: y0 / this.height };
    place.width = (x1 - x0) / this.width;
    place.height = (y1 - y0) / this.height;
    for (const [side, part] of Object.entries(place)) this.frame.style[side] = `${100 * part}%`;
    this.readout.textContent = `${x1 - x0} × ${y1 - y0} at ${x0}, ${y0}`;
  }

  finish() {
    if (String(this.box) === String(this.done)) return;
    this.done = this.box;
    this.onDone(this.box);
  }

  /** Remove the box. */
  clear() {
    if (this.held) this.cancel();
    this.put(null);
    this.finish();
  }

  get smallest() {
    return Math.max(1, Math.round(SMALLEST * Math.min(this.width, this.height)));
  }

  point(event) {
    const at = this.stage.getBoundingClientRect();
    const x = ((event.clientX - at.left) / at.width) * this.width;
    const y = ((event.clientY - at.top) / at.height) * this.height;
    return [clamp(x, 0, this.width), clamp(y, 0, this.height)];
  }

  grab(event) {
    if (!this.active || !event.isPrimary || event.button !== 0) return;
    event.preventDefault();
    this.stage.focus({ preventScroll: true, focusVisible: false });
    this.stage.setPointerCapture(event.pointerId);
    const handle = event.target.dataset.at ?? "";
    const kind = handle ? "resize" : event.target === this.frame ? "move" : "draw";
    this.held = { kind, handle, from: this.point(event), before: this.box };
  }

  drag(event) {
    if (!this.held) return;
    const { kind, handle, from, before } = this.held;
    const [x, y] = this.point(event);
    if (kind === "draw") {
      this.put(this.tidy([from[0], from[1], x, y]));
    } else if (kind === "move") {
      this.put(this.moved(before, x - from[0], y - from[1]));
    } else {
      const box = [...before];
      if (handle.includes("w")) box[0] = x;
      if (handle.includes("e")) box[2] = x;
      if (handle.includes("n")) box[1] = y;
      if (handle.includes("s")) box[3] = y;
      this.put(this.tidy(box));
    }
  }

  release() {
    if (!this.held) return;
    const { before } = this.held;
    this.held = null;
    if (this.box) {
      const [x0, y0, x1, y1] = this.box;
      if (Math.min(x1 - x0, y1 - y0) < this.smallest) this.put(before);
    }
    this.finish();
  }

  cancel() {
    if (!this.held) return;
    this.put(this.held.before);
    this.held = null;
  }

  tidy([x0, y0, x1, y1]) {
    const sorted = [Math.min(x0, x1), Math.min(y0, y1), Math.max(x0, x1), Math.max(y0, y1)];
    return sorted.map(Math.round);
  }

  moved([x0, y0, x1, y1], dx, dy) {
    const right = Math.round(clamp(dx, -x0, this.width - x1));
    const down = Math.round(clamp(dy, -y0, this.height - y1));
    return [x0 + right, y0 + down, x1 + right, y1 + down];
  }

  press(event) {
    if (!this.active || event.altKey || event.ctrlKey || event.metaKey) return;
    const arrow = ARROWS[event.key];
    if (!arrow) return;
    event.preventDefault();
    const step = Math.max(1, Math.round(STEP * Math.max(this.width, this.height)));
    const [dx, dy] = arrow.map((sign) => sign * step);
    if (!this.box) {
      const { width: w, height: h } = this;
      this.put([w / 4, h / 4, (3 * w) / 4, (3 * h) / 4].map(Math.round));
    } else if (event.shiftKey) {
      const [x0, y0, x1, y1] = this.box;
      const right = clamp(x1 + dx, x0 + this.smallest, this.width);
      this.put([x0, y0, right, clamp(y1 + dy, y0 + this.smallest, this.height)]);
    } else {
      this.put(this.moved(this.box, dx, dy));
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.settle(), REST);
  }

  settle() {
    if (this.timer === null) return;
    clearTimeout(this.timer);
    this.timer = null;
    this.finish();
  }
}
