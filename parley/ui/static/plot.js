// A small line plot as SVG: time from left to right, one or two lines, and the values under the pointer.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 110;
const PAD = { left: 44, right: 6, top: 8, bottom: 18 };

function draw(name, attributes, text) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Return a round number that is not below this one, for the end of a scale. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/**
 * Return a plot. ``lines``: [{name, values}] with null where there is nothing; ``times`` in seconds;
 * ``format`` writes a value; ``span`` is the time that the plot shows, up to ``now``.
 */
export function plot({ title, times, lines, format, span, now, most }) {
  const top = most ?? roundUp(Math.max(0, ...lines.flatMap((line) => line.values.filter((value) => value !== null))));
  const x = (time) => PAD.left + (WIDTH - PAD.left - PAD.right) * (1 - (now - time) / span);
  const y = (value) => HEIGHT - PAD.bottom - (HEIGHT - PAD.top - PAD.bottom) * (value / top);
  const latest = lines.map((line) => `${line.name} ${describe(line.values.findLast((value) => value !== null), format)}`);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${latest.join(", ")}` });
  for (const share of [0, 0.5, 1]) {
    svg.append(draw("line", { class: "grid", x1: PAD.left, x2: WIDTH - PAD.right, y1: y(top * share), y2: y(top * share) }));
    svg.append(draw("text", { class: "axis", x: PAD.left - 5, y: y(top * share) + 3.5, "text-anchor": "end" }, format(top * share)));
  }
  svg.append(draw("text", { class: "axis", x: PAD.left, y: HEIGHT - 4 }, `−${span / 60} min`));
  svg.append(draw("text", { class: "axis", x: WIDTH - PAD.right, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  lines.forEach((line, number) => svg.append(draw("path", { class: `line line-${number + 1}`, d: trace(times, line.values, x, y, now - span) })));
  followPointer(svg, { times, lines, format, x, y, now, span });
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.append(Object.assign(document.createElement("strong"), { textContent: title }));
  lines.forEach((line, number) => {
    const entry = document.createElement("span");
    entry.className = `entry entry-${number + 1}`;
    entry.textContent = latest[number];
    caption.append(entry);
  });
  figure.append(caption, svg);
  return figure;
}

const describe = (value, format) => (value === undefined || value === null ? "–" : format(value));

function trace(times, values, x, y, start) {
  let path = "";
  let pen = false;
  values.forEach((value, at) => {
    if (value === null || times[at] < start) {
      pen = false;
      return;
    }
    const lonely = !pen && (values[at + 1] === null || at + 1 === values.length);
    path += `${pen ? "L" : "M"}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}${lonely ? "h1.5" : ""}`;
    pen = true;
  });
  return path;
}

function followPointer(svg, { times, lines, format, x, y, now, span }) {
  const mark = draw("g", { class: "mark" });
  svg.append(mark);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    let near = -1;
    times.forEach((time, at) => {
      if (time >= now - span && lines.some((line) => line.values[at] !== null) && (near < 0 || Math.abs(x(time) - place) < Math.abs(x(times[near]) - place))) near = at;
    });
    mark.replaceChildren();
    if (near < 0) return;
    mark.append(draw("line", { x1: x(times[near]), x2: x(times[near]), y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    for (const line of lines) if (line.values[near] !== null) mark.append(draw("circle", { cx: x(times[near]), cy: y(line.values[near]), r: 2.5 }));
    const text = `${new Date(times[near] * 1000).toLocaleTimeString()}  ${lines.map((line) => describe(line.values[near], format)).join(" / ")}`;
    const right = x(times[near]) > WIDTH / 2;
    mark.append(draw("text", { x: x(times[near]) + (right ? -5 : 5), y: PAD.top + 8, "text-anchor": right ? "end" : "start" }, text));
  });
  svg.addEventListener("pointerleave", () => mark.replaceChildren());
}
