// Filters of the results: a list of values for each attribute with few of them, a range for numbers
// and dates, and a text for others. On a phone they are in a sheet.

import { byId, make } from "./dom.js";

const MOST = 8; // attributes

const word = (name) => `"${name.replaceAll('"', '""')}"`;
const text = (value) => `'${value.replaceAll("'", "''")}'`;
const isNumber = (value) => value.trim() !== "" && Number.isFinite(Number(value));
const isDay = (value) => /^\d{4}-\d\d-\d\d$/.test(value) && !Number.isNaN(Date.parse(value));
const dayAfter = (day) => new Date(Date.parse(day) + 86_400_000).toISOString().slice(0, 10);

// What a filter other than a value may have: how it is checked, and how it is written for the server.
const PARTS = {
  least: [isNumber, (name, value) => `${name} >= ${Number(value)}`],
  most: [isNumber, (name, value) => `${name} <= ${Number(value)}`],
  since: [isDay, (name, value) => `${name} >= ${text(value)}`],
  until: [isDay, (name, value) => `${name} < ${text(dayAfter(value))}`],
  has: [(value) => value !== "", (name, value) => `${name} contains ${text(value)}`],
};

/** The valid parts of a filter that a user has typed or opened; null if there are none. */
export function checked(filter) {
  if (typeof filter === "string") return filter;
  const valid = Object.entries(filter ?? {}).filter(
    ([part, value]) => typeof value === "string" && PARTS[part]?.[0](value),
  );
  return valid.length ? Object.fromEntries(valid) : null;
}

/** The expression of filters for the server: {color: "red", price: {most: "9"}} -> "color" = 'red' and "price" <= 9. */
export function toExpression(filters) {
  return Object.entries(filters)
    .flatMap(([name, filter]) =>
      typeof filter === "string"
        ? [`${word(name)} = ${text(filter)}`]
        : Object.entries(filter).map(([part, value]) => PARTS[part][1](word(name), value)),
    )
    .join(" and ");
}

export class FilterBar {
  /** @param {(filters: Object) => void} onChange called with the filters by attribute. */
  constructor(bar, onChange) {
    this.bar = bar;
    this.onChange = onChange;
    this.facets = [];
    this.filters = {};
    this.clear = make("button", { type: "button", class: "plain" }, "Clear filters");
    this.clear.addEventListener("click", () => onChange({}));
    const phone = matchMedia("(max-width: 820px)");
    const fold = () => bar.toggleAttribute("popover", phone.matches);
    phone.addEventListener("change", fold);
    fold();
  }

  /** Set the attributes with their values and counts. */
  set(facets) {
    const useful = facets.filter(({ values }) => values.length !== 1);
    this.facets = useful.slice(0, MOST);
    this.controls = null;
  }

  /** Show the attributes with the chosen filters. */
  show(filters) {
    this.filters = filters;
    const names = [...new Set([...this.facets.map(({ name }) => name), ...Object.keys(filters)])];
    if (this.controls?.map(({ name }) => name).join("\n") !== names.join("\n")) {
      this.controls = names.map((name) => this.control(name));
      const done = { type: "button", class: "solid done", popovertarget: "filters", popovertargetaction: "hide" };
      const parts = this.controls.map(({ element }) => element);
      this.bar.replaceChildren(...parts, this.clear, make("button", done, "Show results"));
    }
    // In place, so that the keyboard focus stays.
    for (const { name, update } of this.controls) update(filters[name]);
    const chosen = Object.keys(filters).length;
    this.clear.hidden = !chosen;
    this.bar.hidden = byId("filters-open").hidden = !names.length;
    byId("filters-open").textContent = chosen ? `Filters (${chosen})` : "Filters";
  }

  control(name) {
    const facet = this.facets.find((each) => each.name === name) ?? { name, kind: "text", values: [] };
    const change = (filter) => {
      const { [name]: _, ...others } = this.filters;
      const valid = checked(filter);
      this.onChange(valid === null ? others : { ...others, [name]: valid });
    };
    const filter = this.filters[name];
    if (facet.values.length || typeof filter === "string") return valueList(facet, change);
    const kind = filter?.least || filter?.most ? "number" : filter?.since || filter?.until ? "date" : facet.kind;
    if (kind === "number") return inputs(facet, { least: "from", most: "to" }, { type: "number", step: "any" }, change);
    if (kind === "date") return inputs(facet, { since: "from", until: "to" }, { type: "date" }, change);
    return inputs(facet, { has: "contains" }, { type: "search" }, change);
  }
}

/** A list of the values of an attribute. */
function valueList({ name, values }, change) {
  const list = make("select", {});
  let shown = [];
  const update = (chosen) => {
    const known = chosen === undefined || values.some(({ value }) => value === chosen);
    shown = known ? values : [...values, { value: chosen, count: 0 }];
    const options = shown.map(({ value, count }, number) =>
      make("option", { value: String(number), selected: value === chosen }, `${value} (${count.toLocaleString("en")})`),
    );
    list.replaceChildren(make("option", { value: "-1" }, "all"), ...options);
  };
  list.addEventListener("change", () => change(shown[Number(list.value)]?.value ?? null));
  return { name, update, element: make("label", {}, make("span", {}, name), list) };
}

/** Inputs for the parts of a filter: the ends of a range, or a text. */
function inputs({ name, lowest = "", highest = "" }, parts, settings, change) {
  const ends = { least: lowest, most: highest };
  const days = settings.type === "date" ? { min: lowest.slice(0, 10), max: highest.slice(0, 10) } : {};
  const fields = Object.entries(parts).map(([part, label]) => {
    const about = { "aria-label": `${name} ${label}`, placeholder: ends[part] ?? label };
    return [part, make("input", { ...settings, ...days, ...about })];
  });
  const read = () => change(Object.fromEntries(fields.map(([part, input]) => [part, input.value])));
  for (const [, input] of fields) input.addEventListener("change", read);
  const update = (filter) => {
    for (const [part, input] of fields) input.value = filter?.[part] ?? "";
  };
  const element = make("div", { class: "range", role: "group", "aria-label": name });
  element.append(make("span", {}, name), ...fields.map(([, input]) => input));
  return { name, update, element };
}
