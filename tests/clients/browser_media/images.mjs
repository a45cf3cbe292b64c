// Images in the web page: pasted, dropped and picked, sent in each API that takes them, and refused where none does.

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [, , address, ...models] = process.argv;
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
try {
  const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
  const wrong = [];
  page.on("pageerror", (error) => wrong.push(error.message));
  await page.goto(`http://${address}/`);
  await page.waitForSelector("#members .field");
  const state = await (await fetch(`http://${address}/ui/activity`)).json();
  const reader = state.models.find((model) => model.media.includes("image")).name;
  assert.ok(models.includes(reader));
  const blind = state.models.find((model) => model.generates && !model.media.includes("image"));

  const give = (kind) => page.evaluate(async (name) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 48, height: 48 });
    const brush = canvas.getContext("2d");
    brush.fillStyle = name === "paste" ? "red" : "blue";
    brush.fillRect(0, 0, 48, 48);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    const data = new DataTransfer();
    data.items.add(new File([blob], "p.png", { type: "image/png" }));
    const event = name === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }) : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.querySelector("#prompt").dispatchEvent(event);
  }, kind);

  await page.selectOption(".pane-head select", reader);
  const apis = await page.$$eval("#api option", (options) => options.map((option) => option.value));
  const sent = [];
  for (const api of apis) {
    await page.click("#new");
    await page.selectOption("#api", api);
    await page.waitForSelector(`[id^="member-${api}-"]`);
    await page.selectOption(".pane-head select", reader);
    if (!(await page.isVisible("#image"))) continue;
    await give("paste");
    await give("drop");
    await page.waitForFunction(() => document.querySelectorAll("#images img").length === 2);
    const limit = page.locator('[id^="member-"]').filter({ visible: true });
    for (const name of ["max_tokens", "max_output_tokens", "num_predict"]) {
      const field = page.locator(`[id="member-${api}-${name}"], [id="member-${api}-${name}-in"]`).first();
      if (await field.count()) {
        await field.fill("16");
        break;
      }
    }
    assert.ok((await limit.count()) > 0);
    await page.fill("#prompt", "What is in these images?");
    const [request] = await Promise.all([page.waitForRequest((each) => each.method() === "POST"), page.keyboard.press("Enter")]);
    assert.ok(request.postData().includes("iVBORw0KGgo"), api);
    await page.waitForSelector(".message.assistant:not(.streaming)", { timeout: 60_000 });
    assert.equal(await page.locator(".message .error").count(), 0, `${api}: ${await page.locator(".log").innerText()}`);
    assert.equal(await page.locator(".message.user img.image").count(), 2);
    sent.push(api);
  }
  assert.ok(sent.length >= 8, sent.join(" "));
  if (blind) {
    await page.click("#new");
    await page.selectOption(".pane-head select", blind.name);
    await give("paste");
    await page.waitForFunction(() => /does not read images|not sent/.test(document.querySelector("#notice").textContent));
    assert.equal(await page.locator("#images img").count(), 0);
  }

  // A conversation that an earlier version saved has its images in ``pictures``.
  await page.evaluate(() => new Promise((resolve, reject) => {
    const opening = indexedDB.open("parley", 1);
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const table = opening.result.transaction("conversations", "readwrite").objectStore("conversations");
      const reading = table.getAll();
      reading.onsuccess = () => {
        const saved = reading.result.find(({ panes }) => panes.some(({ messages }) => messages.some(({ images }) => images?.length)));
        for (const message of saved.panes.flatMap(({ messages }) => messages)) {
          if (!message.images) continue;
          message.pictures = message.images;
          delete message.images;
        }
        const writing = table.put({ ...saved, id: "earlier", title: "Earlier version", changed: Date.now() });
        writing.onsuccess = resolve;
        writing.onerror = () => reject(writing.error);
      };
    };
  }));
  await page.reload();
  await page.getByText("Earlier version").first().click();
  await page.waitForFunction(() => document.querySelectorAll(".message.user img.image").length === 2);
  assert.deepEqual(wrong, []);
  console.log("good");
} finally {
  await browser.close();
}
