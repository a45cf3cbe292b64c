// The web page in a real Chromium: every API, everything that can be done with an answer, keys, widths, and axe's rules.

import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [, , address, model] = process.argv;
const ROOT = `http://${address}`;
const QUESTION = "What is the capital of France?";
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf-8");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });

/** Open a page in a profile of its own. Errors on it fail the test, and so does a request to another host. */
async function open(path, { root = ROOT, allowed = /^$/, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, ...options });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  const page = await context.newPage();
  page.wrong = [];
  page.on("pageerror", (error) => page.wrong.push(error.message));
  page.on("console", (message) => message.type() === "error" && !allowed.test(message.text()) && page.wrong.push(message.text()));
  page.on("request", (request) => !/^(blob|data):/.test(request.url()) && !request.url().startsWith(root) && page.wrong.push(request.url()));
  await page.goto(root + path);
  return page;
}

async function close(page) {
  assert.deepEqual(page.wrong, []);
  await page.context().close();
}

async function openPlayground(options) {
  const page = await open("/", options);
  await page.waitForSelector("#members .field", { state: "attached" });
  return page;
}

const ended = (page, count = 1) => page.waitForFunction((wanted) => document.querySelectorAll(".message.assistant:not(.streaming)").length >= wanted, count, { timeout: 60_000 });
const answerText = async (page) => (await page.locator(".message.assistant .markdown, .message.assistant .tokens, .message.assistant .message-body > .plain").last().innerText()).trim();

async function send(page, text, count = 1) {
  await page.fill("#prompt", text);
  await page.keyboard.press("Enter");
  await ended(page, count);
}

async function setMember(page, name, value) {
  if (await page.locator(".more:not([open]) > summary").count()) await page.click(".more > summary");
  const field = page.locator(`[id^="member-"][id$="-${name}"], [id^="member-"][id$="-${name}-in"]`).first();
  if ((await field.evaluate((each) => each.tagName)) === "SELECT") await field.selectOption(value);
  else await field.fill(value);
}

const tests = {
  async "a conversation streams, is remembered, and knows its earlier turns"() {
    const page = await openPlayground();
    await setMember(page, "temperature", "0");
    await page.fill("#prompt", QUESTION);
    // Observed in the page: an answer may stream and end between two looks from here.
    const streamed = page.evaluate(() => new Promise((resolve) => {
      new MutationObserver((changes, observer) => {
        if (!document.querySelector(".streaming")) return;
        observer.disconnect();
        resolve();
      }).observe(document.body, { childList: true, subtree: true });
    }));
    await page.keyboard.press("Enter");
    await streamed;
    await ended(page);
    assert.match(await answerText(page), /Paris/);
    await send(page, "What is the capital of Italy?", 2);
    const [request] = await Promise.all([page.waitForRequest((each) => each.method() === "POST"), page.click('[aria-label="Regenerate"]')]);
    assert.deepEqual(request.postDataJSON().messages.map((message) => message.role), ["user", "assistant", "user"]);
    await ended(page, 2);
    assert.match(await answerText(page), /Rome/);
    await page.waitForTimeout(600);
    await page.reload();
    await page.click(".conversation");
    assert.equal(await page.locator(".message.assistant").count(), 2);
    await page.click('#conversations [aria-label^="Delete"]');
    await page.click("dialog .primary");
    await page.waitForSelector("#no-conversations:not([hidden])");
    await close(page);
  },

  async "an answer stops, and a message is edited and sent again"() {
    const page = await openPlayground();
    await setMember(page, "max_tokens", "3000");
    await setMember(page, "ignore_eos", "true");
    await page.fill("#prompt", QUESTION);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector(".streaming .markdown")?.textContent.length > 20, null, { timeout: 60_000 });
    await page.click("#stop");
    await ended(page);
    assert.match(await page.locator(".facts").innerText(), /stopped/);
    await page.waitForFunction(async () => (await (await fetch("ui/activity")).json()).request_count === 0);
    await page.fill("#prompt", QUESTION);
    await page.keyboard.press("Enter");
    await page.waitForSelector(".streaming");
    await page.click("#new"); // ends it, and is ready for another message
    await page.waitForSelector("#send:not([hidden])");
    await page.waitForFunction(async () => (await (await fetch("ui/activity")).json()).request_count === 0);
    await page.click(".conversation");
    await page.locator('[aria-label="Edit and send again"]').nth(1).click();
    await page.fill("#prompt", "");
    await setMember(page, "max_tokens", "");
    await setMember(page, "ignore_eos", "");
    await page.click('[aria-label="Edit and send again"]');
    assert.equal(await page.inputValue("#prompt"), QUESTION);
    assert.equal(await page.locator(".message").count(), 0);
    await send(page, "What is the capital of Spain?");
    assert.match(await answerText(page), /Madrid/);
    await close(page);
  },

  async "a tool call is shown and answered by hand, in each API that has tools"() {
    const page = await openPlayground();
    const choices = { "openai-chat": ["tool_choice", "required"], "openai-responses": ["tool_choice", "required"], anthropic: ["tool_choice", '{"type": "any"}'] };
    for (const [api, [member, value]] of Object.entries(choices)) {
      await page.click("#new");
      await page.selectOption("#api", api);
      await page.waitForSelector(`[id^="member-${api}-"]`);
      await page.click("#tools-example");
      await page.locator(`[id="member-${api}-${member}"]`).evaluate((field, text) => {
        if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === text)) field.append(new Option(text, text));
        field.value = text;
        field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
      }, value);
      await send(page, "What is the weather in Paris?");
      assert.equal(await page.locator(".call-name code").innerText(), "get_weather", api);
      assert.ok("city" in JSON.parse(await page.locator(".call pre").innerText()), api);
      await page.fill(".call-result", '{"weather": "sunny"}');
      await page.click(".calls button");
      await page.waitForFunction(() => document.querySelectorAll(".message.assistant:not(.streaming)").length === 2, null, { timeout: 60_000 });
      assert.equal(await page.locator(".message .error").count(), 0, `${api}: ${await page.locator(".log").innerText()}`);
    }
    await close(page);
  },

  async "an answer follows a JSON schema"() {
    const page = await openPlayground();
    await page.click("#schema-example");
    await setMember(page, "temperature", "0");
    await send(page, QUESTION);
    assert.deepEqual(Object.keys(JSON.parse(await answerText(page))), ["city", "capital"]);
    await page.fill("#schema", "{");
    assert.equal(await page.getAttribute("#schema", "aria-invalid"), "true");
    await send(page, QUESTION, 2);
    assert.match(await page.locator(".message .error").last().innerText(), /JSON schema/);
    await close(page);
  },

  async "tokens have colours and alternatives, for the pointer and the keyboard"() {
    const page = await openPlayground();
    await page.selectOption("#alternatives", "3");
    await send(page, QUESTION);
    const tokens = page.locator(".token");
    assert.ok((await tokens.count()) > 4);
    await tokens.nth(1).hover();
    assert.equal(await page.locator(".tip tr").count(), 3);
    await tokens.first().focus();
    await page.keyboard.press("ArrowRight");
    assert.match(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), /%.*; /);
    await close(page);
  },

  async "what is copied runs, as curl and as Python"() {
    const page = await openPlayground();
    await page.fill("#system", "Answer in 'one' \"sentence\" — é 🙂.");
    await setMember(page, "temperature", "0");
    for (const stream of [true, false]) {
      await page.setChecked("#stream", stream);
      await page.click("#new");
      await page.setChecked("#stream", stream);
      await page.fill("#system", "Answer in 'one' \"sentence\" — é 🙂.");
      await send(page, QUESTION);
      await page.click("text=Copy as…");
      for (const [language, command] of [["curl", ["bash", "-c"]], ["python", [process.env.SERVER_PYTHON ?? "python3", "-c"]], ["javascript", ["node", "--input-type=module", "-e"]]]) {
        await page.click(`[data-language="${language}"]`);
        await page.click("dialog .primary");
        const program = await page.evaluate(() => navigator.clipboard.readText());
        const done = spawnSync(command[0], [...command.slice(1), program], { encoding: "utf-8", timeout: 60_000 });
        assert.equal(done.status, 0, program + done.stderr);
        assert.match(done.stdout, stream ? /data: .*Paris/ : /Paris/, program);
        assert.ok(!stream || done.stdout.includes("[DONE]"));
      }
      await page.keyboard.press("Escape");
    }
    await close(page);
  },

  async "every API answers"() {
    const page = await openPlayground();
    const apis = await page.$$eval("#api option", (options) => options.map((option) => option.value));
    assert.ok(apis.length >= 17);
    for (const api of apis) {
      await page.click("#new");
      await page.selectOption("#api", api);
      await page.waitForSelector(`[id^="member-${api}-"]`);
      await send(page, QUESTION);
      assert.equal(await page.locator(".message .error").count(), 0, `${api}: ${await page.locator(".log").innerText()}`);
      if (!(await page.locator("#note").innerText())) assert.match(await answerText(page), /Paris/, api);
    }
    await close(page);
  },

  async "two models answer side by side"() {
    const page = await openPlayground();
    await page.click("#add-model");
    await page.fill("#prompt", QUESTION);
    await page.keyboard.press("Enter");
    await ended(page, 2);
    assert.deepEqual(await page.$$eval(".pane", (panes) => panes.map((pane) => pane.querySelectorAll(".message.assistant").length)), [1, 1]);
    await close(page);
  },

  async "text of users and models is never HTML"() {
    const page = await openPlayground();
    const hostile = "<img src=x onerror=\"document.title='owned'\"> [a](javascript:document.title='owned') <script>document.title='owned'</script> ![p](http://example.com/p.png)";
    await page.evaluate(async (text) => {
      const { renderMarkdown } = await import("/ui/markdown.js");
      document.querySelector(".log").replaceChildren(...renderMarkdown(`${text}\n\n- ${text}\n\n|a|b|\n|-|-|\n|${text}|2|\n\n\`\`\`html\n${text}\n\`\`\``));
    }, hostile);
    assert.equal(await page.locator(".log img, .log script, .log a[href^='javascript']").count(), 0);
    assert.equal(await page.title(), "parley playground");
    await close(page);
  },

  async "the status page shows what runs"() {
    const page = await open("/ui/status");
    const stopper = new AbortController();
    const body = { model, prompt: "a", max_tokens: 3000, ignore_eos: true, stream: true };
    const request = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: stopper.signal };
    const keepBusy = async () => { // the page looks every two seconds, in which an answer may begin and end
      while (!stopper.signal.aborted) await (await fetch(`${ROOT}/v1/completions`, request)).text();
    };
    const busy = keepBusy().catch((error) => assert.equal(error.name, "AbortError"));
    await page.waitForSelector("#requests tr", { timeout: 20_000 });
    assert.match(await page.locator("#requests tr").innerText(), /openai/);
    const models = await page.locator("section.model").count(); // at a coordinator, those of each instance
    assert.ok(models > 0);
    assert.equal(await page.locator("figure").count(), 6 * models);
    await page.waitForFunction(() => [...document.querySelectorAll(".tiles")].some((tiles) => tiles.querySelector("strong").textContent === "1"));
    stopper.abort();
    await busy;
    await page.waitForSelector("#no-requests:not([hidden])", { timeout: 20_000 });
    await close(page);
  },

  async "the page of the APIs tries an operation"() {
    const page = await open("/docs");
    await page.selectOption("#document", "openai");
    await page.fill("#filter", "/v1/chat/completions");
    await page.click(".operation summary");
    assert.match(await page.locator(".described > p code").first().innerText(), /^\w+$/);
    assert.doesNotMatch(await page.locator(".described").innerText(), /`/); // names in descriptions are elements
    await page.click(".operation button.primary");
    await page.waitForFunction(() => document.querySelector(".trial .program").textContent.includes("Paris"), null, { timeout: 60_000 });
    assert.match(await page.locator(".trial [role=status]").innerText(), /^200 OK/);
    for (const prefix of await page.$$eval("#document option", (options) => options.map((option) => option.value))) {
      await page.fill("#filter", "");
      await page.selectOption("#document", prefix);
      await page.waitForFunction((each) => document.querySelector("#raw").href.endsWith(`${each && `/${each}`}/openapi.json`) && document.querySelectorAll(".operation").length > 0, prefix);
    }
    await close(page);
  },

  async "a key is asked for, and kept for the tab alone"() {
    const port = await startKeyed();
    const root = `http://127.0.0.1:${port}`;
    const page = await open("/", { root, allowed: /401/ });
    await page.waitForSelector("dialog[open]");
    assert.match(await page.locator("dialog").innerText(), /This server needs an API key/);
    await page.fill("dialog input", "wrong");
    await page.click("dialog .primary");
    await page.waitForFunction(() => document.querySelector("dialog[open] p")?.textContent.includes("Incorrect"));
    await page.fill("dialog input", "sk-page-0123456789");
    await page.click("dialog .primary");
    await page.waitForSelector("#members .field");
    await send(page, QUESTION);
    assert.match(await answerText(page), /Paris/);
    await page.click("text=Copy as…");
    assert.ok(!(await page.locator("dialog code").innerText()).includes("sk-page"));
    const stored = await page.evaluate(async () => {
      const databases = await new Promise((resolve) => {
        const request = indexedDB.open("parley", 1);
        request.onsuccess = () => (request.result.transaction("conversations").objectStore("conversations").getAll().onsuccess = (event) => resolve(event.target.result));
      });
      return [JSON.stringify(sessionStorage), JSON.stringify(localStorage) + JSON.stringify(databases) + document.cookie];
    });
    assert.ok(stored[0].includes("sk-page") && !stored[1].includes("sk-page"));
    await close(page);
  },

  async "nothing is wider than the window, and axe finds nothing serious"() {
    for (const colorScheme of ["light", "dark"])
      for (const [width, height] of [[360, 740], [768, 1000], [1440, 900], [2560, 1300]]) {
        const page = await openPlayground({ viewport: { width, height }, colorScheme, bypassCSP: true });
        await check(page, "empty");
        if (width < 1090) await page.click("#settings-toggle");
        await page.selectOption("#alternatives", "3");
        await page.click("#tools-example");
        await page.waitForTimeout(250);
        await check(page, "settings");
        if (width < 1090) await page.keyboard.press("Escape");
        await send(page, QUESTION);
        await page.mouse.move(5, 300);
        await check(page, "answered");
        await page.click("text=Copy as…");
        await check(page, "copy");
        await page.keyboard.press("Escape");
        if (width < 768) {
          await page.click("#list-toggle");
          await page.waitForTimeout(250);
          await check(page, "list");
        }
        await page.goto(`${ROOT}/ui/status`);
        await page.waitForSelector("figure");
        await check(page, "status");
        await page.goto(`${ROOT}/docs`);
        await page.waitForSelector(".operation");
        await page.click(".operation summary");
        await check(page, "docs");
        await close(page);
      }
    assert.deepEqual([...found], []);
  },
};

const found = new Set(); // faults of all pages and widths, so that one run shows them together

async function check(page, name) {
  const size = page.viewportSize();
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wide > 0) found.add(`${name} at ${size.width}: ${wide} px too wide`);
  if (![360, 1440].includes(size.width)) return; // the rules of axe take long, and the widths between have the same elements
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const { id, impact, nodes } of violations)
    if (["serious", "critical"].includes(impact)) for (const node of nodes) found.add(`${name}: ${id}: ${node.html.slice(0, 150)} ${node.failureSummary}`);
}

let keyed = null;

/** Start a server with a key; return its port. */
async function startKeyed() {
  keyed = spawn(process.env.SERVER_PYTHON ?? "python3", ["-m", "parley", "serve", "--port", "0", "--kv-memory", "64MiB", "--api-key", "sk-page-0123456789"], { cwd: process.env.CLIENTS_SOURCE && `${process.env.CLIENTS_SOURCE}/../..`, stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  for await (const part of keyed.stdout) {
    text += part;
    if (/^ready in/m.test(text)) break;
  }
  return /http:\/\/127\.0\.0\.1:(\d+)/.exec(text)[1];
}

const wanted = process.env.ONLY ?? "";
try {
  for (const [name, test] of Object.entries(tests)) {
    if (!name.includes(wanted)) continue;
    console.log(name);
    await test();
  }
  console.log("good");
} finally {
  keyed?.kill();
  await browser.close();
}
