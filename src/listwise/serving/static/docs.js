// The page /docs: every request of the HTTP interface, from its OpenAPI description.

import { make } from "./dom.js";

/** The type of a value in words, with its default. */
function shapeOf(schema = {}) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(shapeOf).join(" or ");
  const items = schema.type === "array" ? `list of ${shapeOf(schema.items) || "any"}` : null;
  const shape = items ?? schema.type ?? "";
  return "default" in schema ? `${shape} = ${JSON.stringify(schema.default)}` : shape;
}

/** The name, the type and the meaning of each parameter, field and answer. */
function rowsOf({ parameters = [], requestBody, responses }) {
  const rows = parameters.map((each) => [`${each.name} (${each.in})`, shapeOf(each.schema), each.description]);
  for (const { schema } of Object.values(requestBody?.content ?? {})) {
    for (const [name, field] of Object.entries(schema.properties ?? {})) {
      rows.push([`${name} (form)`, shapeOf(field), field.description]);
    }
  }
  for (const [status, { content = {}, description }] of Object.entries(responses)) {
    const shapes = Object.entries(content).map(([kind, { schema }]) => shapeOf(schema) || kind);
    rows.push([`response ${status}`, shapes.join(", "), description]);
  }
  return rows;
}

/** The section of one request. */
function sectionOf(method, path, operation) {
  const rows = rowsOf(operation).map(([name, shape, text]) =>
    make("tr", {}, make("th", {}, name), make("td", {}, make("code", {}, shape)), make("td", {}, text ?? "")));
  return make("section", {},
    make("h2", {}, make("code", {}, `${method.toUpperCase()} ${path}`)),
    make("p", {}, operation.description ?? ""),
    make("table", {}, make("tbody", {}, ...rows)));
}

const { paths } = await (await fetch("/openapi.json")).json();
const sections = Object.entries(paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => sectionOf(method, path, operation)));
document.querySelector("main").append(...sections);
