// A client of HTTP/2 over TLS by Node's own library: node http2_client.mjs ADDRESS AUTHORITY
// It writes one line of JSON: the protocol that ALPN chose, the version of TLS, and the answers.

import http2 from "node:http2";
import { readFileSync } from "node:fs";

const [, , address, authority] = process.argv;
const session = http2.connect(address, { ca: readFileSync(authority) });
session.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
function send(path, body) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ":method": body ? "POST" : "GET", ":path": path, "content-type": "application/json" });
    const answer = { status: 0, type: "", parts: 0, text: "" };
    stream.setEncoding("utf8");
    stream.on("response", (headers) => Object.assign(answer, { status: headers[":status"], type: headers["content-type"] }));
    stream.on("data", (text) => Object.assign(answer, { parts: answer.parts + 1, text: answer.text + text }));
    stream.on("end", () => resolve(answer));
    stream.on("error", reject);
    stream.end(body && JSON.stringify(body));
  });
}
const chat = { model: "tiny", messages: [{ role: "user", content: "Hello" }], max_tokens: 8 };
const models = await send("/v1/models");
const [whole, ...streamed] = await Promise.all([
  send("/v1/chat/completions", chat),
  ...Array.from({ length: 8 }, () => send("/v1/chat/completions", { ...chat, stream: true })),
]);
const refused = await send("/v1/chat/completions", { model: "tiny" });
console.log(JSON.stringify({ protocol: session.alpnProtocol, tls: session.socket.getProtocol(), models, whole, streamed, refused }));
session.close();
