// The query: the chosen photo with its box, the list of examples, and the switches.

import { BoxEditor } from "./box.js";
import { byId, count, cut, icon, iconButton, make } from "./dom.js";
import { setPicture } from "./pictures.js";

export class QueryPanel {
  /** @param {{onBox, onChoose, onRemove, onSwitch, onStore}} acts */
  constructor(acts) {
    this.acts = acts;
    this.image = byId("stage-image");
    this.gone = new Set(); // addresses of photos that cannot be loaded
    this.editor = new BoxEditor(byId("stage"), byId("readout"), (box) => {
      this.unfold(false);
      acts.onBox(box);
    });
    byId("unfold").addEventListener("click", () => this.unfold(byId("unfold").ariaExpanded !== "true"));
    byId("clear-box").addEventListener("click", () => this.editor.clear());
    byId("store").addEventListener("click", () => acts.onStore());
    for (const name of ["expand", "refine", "rerank"]) {
      byId(name).addEventListener("change", ({ target }) => acts.onSwitch(name, target.checked));
    }
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      this.editor.clear();
    });
  }

  /** On a phone the photo is small, unless the user draws a box. */
  unfold(on) {
    byId("unfold").ariaExpanded = String(on);
    byId("unfold").textContent = on ? "Done" : "Draw a box";
    byId("query").classList.toggle("unfolded", on);
  }

  /** Show a search: its examples, the chosen one among them, and its switches. */
  show({ examples, chosen, expand, refine, rerank }, limits, canWrite) {
    const example = examples[chosen];
    byId("expand").checked = expand;
    byId("refine").checked = refine;
    byId("rerank").checked = rerank;
    this.showStage(example);
    this.showStrip(examples, chosen, limits);
    byId("strip").classList.toggle("single", examples.length === 1);
    const own = examples.filter(({ file }) => file).length;
    byId("store-area").hidden = !canWrite || !own;
    const what = own > 1 ? `Add ${own} photos to the index` : "Add to the index";
    byId("store-label").textContent = what;
  }

  showStage(example) {
    const { name, url, preview, width, height, box, unshown } = example;
    const stage = byId("stage");
    stage.style.setProperty("--ratio", width / height);
    const drawable = !unshown && !this.gone.has(url);
    stage.setAttribute("aria-label", drawable ? `${name}: draw a box around what you search for` : name);
    if (this.image.dataset.shown !== url) {
      this.image.dataset.shown = url;
      byId("query").scrollTop = 0;
      setPicture(this.image, url);
      this.image.alt = name;
      // Of a photo whose file is missing the thumbnail is shown, and no box can be drawn.
      this.image.onerror = () => {
        this.image.onerror = null;
        this.gone.add(url);
        setPicture(this.image, preview);
        this.editor.show(width, height, null, false);
      };
    }
    this.editor.show(width, height, box, drawable);
    byId("unfold").hidden = Boolean(unshown);
    byId("clear-box").hidden = box === null;
    byId("box-hint").hidden = box !== null;
    byId("box-hint").textContent = unshown
      ? "This browser cannot show this photo. You can search with it, but not draw a box."
      : "Draw a box to search for a part of the photo";
    byId("query-name").replaceChildren(cut(name));
    byId("query-name").title = name;
    byId("query-name").setAttribute("aria-label", name);
  }

  showStrip(examples, chosen, limits) {
    const { onChoose, onRemove } = this.acts;
    const tiles = examples.map(({ name, preview, box }, number) => {
      const title = box ? `${name}, with a box` : name;
      const pressed = String(number === chosen);
      const image = make("img", { alt: "", draggable: "false" });
      setPicture(image, preview);
      return make(
        "li",
        { class: "example" },
        make(
          "button",
          {
            type: "button",
            class: "choose",
            "aria-pressed": pressed,
            "aria-label": `Show ${title}`,
            title,
            on: { click: () => onChoose(number) },
          },
          image,
        ),
        iconButton("close", `Remove the example ${name}`, () => onRemove(number)),
      );
    });
    const full = examples.length >= limits.photos;
    const label = full ? `${count(limits.photos, "example")} at most` : "Add more examples";
    const more = make(
      "button",
      {
        type: "button",
        class: "more",
        id: "more",
        "aria-label": label,
        title: label,
        disabled: full,
        on: { click: () => byId("more-files").click() },
      },
      icon("plus"),
    );
    byId("strip").replaceChildren(...tiles, make("li", {}, more));
  }
}
