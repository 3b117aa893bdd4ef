// Label by search: the first results or the marked ones get the name of a class.

import * as api from "./api.js";
import { byId, count, make } from "./dom.js";
import { say } from "./notice.js";
import { setPicture } from "./pictures.js";

const PREVIEW = 8; // pictures in the dialog
const FIRST = 10;

export class LabelDialog {
  /**
   * @param {{items, query, most, onLabelled}} acts `items()` are the results, `query()` the key of the
   *   query or null, `most()` the number of classes whose names are suggested.
   */
  constructor(marking, acts) {
    this.marking = marking;
    this.acts = acts;
    this.dialog = byId("label");
    this.form = this.dialog.querySelector("form");
    for (const id of ["label-open", "mark-label"]) byId(id).addEventListener("click", () => this.open());
    byId("label-first").addEventListener("focus", () => (this.form.elements.accept.value = "first"));
    this.form.addEventListener("input", () => this.show());
    this.dialog.addEventListener("close", () => this.dialog.returnValue === "save" && this.store());
  }

  open() {
    if (!this.items.length) return; // the search is not done
    const same = this.items.filter(({ key }) => this.marking.of(key) === true).length;
    const [first] = this.items;
    byId("label-name").value = first?.attributes?.label ?? "";
    byId("label-first").value = Math.min(FIRST, this.items.length);
    byId("label-first").max = this.items.length;
    byId("label-rest").checked = false;
    const { accept } = this.form.elements;
    accept.value = same ? "marked" : "first";
    accept[0].disabled = !same;
    byId("label-marked").textContent = `The ${count(same, "photo")} marked as same`;
    this.dialog.returnValue = "";
    this.show();
    this.dialog.showModal();
    api.classes(this.acts.most()).then(({ classes }) => {
      const names = classes.filter(({ name }) => name).map(({ name: value }) => make("option", { value }));
      byId("label-names").replaceChildren(...names);
    }, () => {}); // without suggestions of names
  }

  get items() {
    return this.acts.items();
  }

  /** The photos that get the label, with their places. */
  get accepted() {
    const ranked = this.items.map((item, at) => ({ ...item, rank: at + 1 }));
    if (this.form.elements.accept.value === "marked") {
      return ranked.filter(({ key }) => this.marking.of(key) === true);
    }
    const first = ranked.slice(0, Number(byId("label-first").value) || 0);
    return first.filter(({ key }) => this.marking.of(key) !== false);
  }

  get rest() {
    const accepted = new Set(this.accepted.map(({ key }) => key));
    const ranked = this.items.map((item, at) => ({ ...item, rank: at + 1 }));
    return ranked.filter(({ key }) => !accepted.has(key) && this.marking.of(key) === undefined);
  }

  show() {
    const { accepted } = this;
    const name = byId("label-name").value.trim();
    const pictures = accepted.slice(0, PREVIEW).map(({ key }) => {
      const image = make("img", { alt: "" });
      setPicture(image, api.thumbnail(key));
      return make("li", {}, image);
    });
    const more = accepted.length - pictures.length;
    if (more > 0) pictures.push(make("li", { class: "quiet" }, `+${more}`));
    byId("label-preview").replaceChildren(...pictures);
    const others = accepted.filter(({ attributes }) => attributes?.label && attributes.label !== name);
    byId("label-replaced").hidden = !others.length || !name;
    byId("label-replaced").textContent = `${count(others.length, "photo")} of these ${others.length === 1 ? "has" : "have"} another label, which will be replaced.`;
    byId("label-others").textContent = `Mark the other ${count(this.rest.length, "photo")} in the list as different`;
    byId("label-rest").disabled = !this.rest.length;
    byId("label-save").disabled = !accepted.length;
  }

  /** Store the marks, then the label; the marks stay if the label fails. */
  async store() {
    const { accepted } = this;
    const rejected = byId("label-rest").checked ? this.rest : [];
    const name = byId("label-name").value.trim();
    const fresh = accepted.filter(({ key }) => this.marking.of(key) !== true);
    const changes = [...fresh.map((item) => ({ ...item, same: true })), ...rejected.map((item) => ({ ...item, same: false }))];
    const { marks } = this.marking;
    const query = this.acts.query();
    const keys = [...new Set([...(query ? [query] : []), ...accepted.map(({ key }) => key)])];
    if (changes.length) this.marking.set(changes);
    await this.finish(marks, name, keys);
  }

  async finish(marks, name, keys) {
    const saved = await this.marking.save(marks, () => this.finish(marks, name, keys));
    if (saved && name) await this.send(name, keys);
  }

  async send(name, keys) {
    try {
      const { labelled } = await api.label(name, keys);
      say(`${count(labelled, "photo")} ${labelled === 1 ? "has" : "have"} the label “${name}”.`, { kind: "news" });
      this.acts.onLabelled();
    } catch (error) {
      say(error.message, { action: { label: "Try again", run: () => this.send(name, keys) } });
    }
  }
}
