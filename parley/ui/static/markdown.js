// A safe subset of Markdown, built as elements: paragraphs, headings, lists, quotes, tables, code, emphasis and links.
// HTML within it stays text. Links open only http, https and mailto addresses; images become links.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MAX_DEPTH = 8; // of quotes, lists and emphasis within each other

/** Return the elements of a text. */
export function renderMarkdown(text) {
  return renderBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function renderBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const code = [];
      const end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (at++; at < lines.length && !end.test(lines[at]); at++) code.push(lines[at]);
      at++;
      blocks.push(make("pre", { tabindex: "0", role: "region", "aria-label": `Code ${fence[2]}`.trim() }, make("code", {}, code.join("\n"))));
    } else if (!line.trim()) {
      at++;
    } else if (RULE.test(line)) {
      blocks.push(make("hr"));
      at++;
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      blocks.push(make(`h${Math.min(6, marks.length + 2)}`, {}, ...renderInline(title)));
      at++;
    } else if (line.trimStart().startsWith(">") && depth < MAX_DEPTH) {
      const quoted = [];
      for (; at < lines.length && lines[at].trimStart().startsWith(">"); at++) quoted.push(lines[at].trimStart().slice(1).replace(/^ /, ""));
      blocks.push(make("blockquote", {}, ...renderBlocks(quoted, depth + 1)));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const [list, next] = renderList(lines, at, depth);
      blocks.push(list);
      at = next;
    } else if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1])) {
      const [table, next] = renderTable(lines, at);
      blocks.push(table);
      at = next;
    } else {
      const paragraph = [line];
      for (at++; at < lines.length && lines[at].trim() && !startsBlock(lines[at]); at++) paragraph.push(lines[at]);
      const children = paragraph.flatMap((each, number) => [...(number ? [make("br")] : []), ...renderInline(each)]);
      blocks.push(make("p", {}, ...children));
    }
  }
  return blocks;
}

const startsBlock = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || line.trimStart().startsWith(">");

function renderList(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const ordered = /\d/.test(mark);
  const list = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  let at = start;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    for (at++; at < lines.length; at++) {
      const deeper = /^ */.exec(lines[at])[0].length > indent.length;
      if (lines[at].trim() && !deeper) break;
      if (!lines[at].trim() && !(lines[at + 1] ?? "").startsWith(" ".repeat(indent.length + 1))) break;
      inner.push(lines[at].slice(Math.min(indent.length + 2, lines[at].length - lines[at].trimStart().length)));
    }
    const blocks = renderBlocks(inner, depth + 1);
    list.append(make("li", {}, ...(blocks.length === 1 && blocks[0].tagName === "P" ? blocks[0].childNodes : blocks)));
    if (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  return [list, at];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function renderTable(lines, start) {
  const row = (tag, line) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...renderInline(cell))));
  const body = make("tbody");
  let at = start + 2;
  for (; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) body.append(row("td", lines[at]));
  const table = make("table", {}, make("thead", {}, row("th", lines[start])), body);
  return [make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, table), at];
}

// The lengths are bounded, so that no text takes long to render.
const INLINE = /(`+)([^`]|[^`][^]{0,2000}?[^`])\1(?!`)|\*\*(?=\S)([^]{1,2000}?)(?<=\S)\*\*|__(?=\S)([^]{1,2000}?)(?<=\S)__|~~(?=\S)([^]{1,2000}?)(?<=\S)~~|\*(?=[^\s*])([^*]{1,2000}?)(?<=\S)\*|(?<![\w])_(?=[^\s_])([^_]{1,2000}?)(?<=\S)_(?![\w])|!?\[([^\]\n]{0,500})\]\(([^()\s]{1,2000})(?:\s+"[^"]{0,500}")?\)|(https?:\/\/[^\s<>"')\]]+)/;

function renderInline(text, depth = 0) {
  const nodes = [];
  let rest = text;
  while (rest) {
    const match = depth < MAX_DEPTH ? INLINE.exec(rest) : null;
    if (!match) break;
    if (match.index) nodes.push(rest.slice(0, match.index));
    const [whole, ticks, code, strong, strong2, struck, emphasis, emphasis2, label, target, address] = match;
    if (ticks) nodes.push(make("code", {}, code));
    else if (strong ?? strong2) nodes.push(make("strong", {}, ...renderInline(strong ?? strong2, depth + 1)));
    else if (struck) nodes.push(make("s", {}, ...renderInline(struck, depth + 1)));
    else if (emphasis ?? emphasis2) nodes.push(make("em", {}, ...renderInline(emphasis ?? emphasis2, depth + 1)));
    else nodes.push(renderLink(label || address || target, target ?? address));
    rest = rest.slice(match.index + whole.length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

function renderLink(label, target) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return `${label} (${target})`;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
