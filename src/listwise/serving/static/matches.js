// The points that two photos have in common: both photos, and a line for each pair.

import { draw } from "./dom.js";

const SIDE = 1000; // of the drawing, in its own units
const GAP = 24;

/**
 * Draw them side by side, or one above the other.
 * @param {{url: string, width: number, height: number}} query as are the points: pixels, upright
 * @param {{url: string, width: number, height: number}} result
 * @param {number[][]} matches [query x, query y, result x, result y]
 */
export function drawMatches(query, result, matches, stacked) {
  const across = stacked ? "width" : "height";
  const [first, second] = [query, result].map((photo) => {
    const scale = SIDE / photo[across];
    return { ...photo, scale, w: photo.width * scale, h: photo.height * scale };
  });
  const shift = stacked ? [0, first.h + GAP] : [first.w + GAP, 0];
  const width = stacked ? SIDE : first.w + GAP + second.w;
  const height = stacked ? first.h + GAP + second.h : SIDE;

  const picture = ({ url, w, h }, x, y) =>
    draw("image", { href: url, x, y, width: w, height: h, preserveAspectRatio: "none" });
  const drawing = draw(
    "svg",
    { class: "matches", viewBox: `0 0 ${width} ${height}`, role: "img" },
    picture(first, 0, 0),
    picture(second, ...shift),
  );
  drawing.style.aspectRatio = `${width} / ${height}`;

  // Colours run over the query, so that neighbouring points have neighbouring colours.
  const order = stacked ? 0 : 1;
  const sorted = [...matches].sort((a, b) => a[order] - b[order]);
  const lines = draw("g", { class: "lines" });
  const dots = draw("g", { class: "dots" });
  sorted.forEach(([qx, qy, x, y], number) => {
    const hue = 20 + (300 * number) / Math.max(1, sorted.length - 1);
    const stroke = `hsl(${hue} 95% 62%)`;
    const a = [qx * first.scale, qy * first.scale];
    const b = [x * second.scale + shift[0], y * second.scale + shift[1]];
    lines.append(draw("path", { d: `M${a}L${b}`, stroke }));
    // A line of no length with a round end is a dot of the same size at every zoom.
    for (const end of [a, b]) dots.append(draw("path", { d: `M${end}h0`, stroke }));
  });
  drawing.append(lines, dots);
  return drawing;
}
