// A request as a program: curl, Python's standard library, JavaScript. The key is never written; it comes from the
// environment.

const KEY_NAME = "PARLEY_API_KEY";

export const LANGUAGES = [
  ["curl", "curl", asCurl],
  ["python", "Python", asPython],
  ["javascript", "JavaScript", asJavaScript],
];

const typeHeader = (body) => (body === undefined ? {} : { "content-type": "application/json" });
const shellQuote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function asCurl({ url, headers, body, stream, withKey, method = "POST" }) {
  const verb = method === (body === undefined ? "GET" : "POST") ? "" : `-X ${method} `;
  const lines = [`curl ${stream ? "-N " : ""}${verb}${shellQuote(url)}`];
  if (body !== undefined) lines.push("-H 'content-type: application/json'");
  for (const [name, value] of Object.entries(headers)) lines.push(`-H ${shellQuote(`${name}: ${value}`)}`);
  if (withKey) lines.push(`-H "authorization: Bearer $${KEY_NAME}"`);
  if (body !== undefined) lines.push(`-d ${shellQuote(JSON.stringify(body, null, 2))}`);
  return `${lines.join(" \\\n  ")}\n`;
}

function asPython({ url, headers, body, stream, withKey, method = "POST" }) {
  const all = Object.entries({ ...typeHeader(body), ...headers }).map(([name, value]) => `    ${pythonValue(name)}: ${pythonValue(value)},`);
  if (withKey) all.push(`    "authorization": "Bearer " + os.environ["${KEY_NAME}"],`);
  return `import json
${withKey ? "import os\n" : ""}import urllib.request

url = ${pythonValue(url)}
headers = {
${all.join("\n")}
}
${body === undefined ? "" : `body = ${pythonValue(body)}\n`}
request = urllib.request.Request(url, ${body === undefined ? "None" : "json.dumps(body).encode()"}, headers, method="${method}")
with urllib.request.urlopen(request) as answer:
${stream ? "    for line in answer:\n        print(line.decode(), end=\"\")" : body === undefined ? "    print(answer.read().decode())" : "    print(json.load(answer))"}
`;
}

/** Return a JSON value as a Python expression. */
function pythonValue(value, indent = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`).replace(/\\u(d[89ab]..)\\u(d[c-f]..)/gi, (_, high, low) => `\\U${(((parseInt(high, 16) - 0xd800) << 10) + parseInt(low, 16) - 0xdc00 + 0x10000).toString(16).padStart(8, "0")}`);
  if (typeof value === "number") return String(value);
  const space = " ".repeat(indent + 4);
  const isList = Array.isArray(value);
  const items = isList ? value.map((each) => pythonValue(each, indent + 4)) : Object.entries(value).map(([name, each]) => `${pythonValue(name)}: ${pythonValue(each, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (!items.length) return open + close;
  return `${open}\n${items.map((item) => `${space}${item},\n`).join("")}${" ".repeat(indent)}${close}`;
}

function asJavaScript({ url, headers, body, stream, withKey, method = "POST" }) {
  const all = { ...typeHeader(body), ...headers };
  const lines = Object.entries(all).map(([name, value]) => `    ${JSON.stringify(name)}: ${JSON.stringify(value)},`);
  if (withKey) lines.push(`    authorization: \`Bearer \${process.env.${KEY_NAME}}\`,`);
  return `const response = await fetch(${JSON.stringify(url)}, {
  method: "${method}",
  headers: {
${lines.join("\n")}
  },${body === undefined ? "" : `\n  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`}
});
${stream ? "const decoder = new TextDecoder();\nfor await (const part of response.body) process.stdout.write(decoder.decode(part, { stream: true }));" : "console.log(await response.text());"}
`;
}
