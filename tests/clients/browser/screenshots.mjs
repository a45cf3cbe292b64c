// Makes the pictures of the web page in docs/: python tests/clients/run.py browser/screenshots.mjs

import { chromium } from "playwright-core";
const [, , address] = process.argv;
const folder = `${process.env.CLIENTS_SOURCE}/../../docs`;
const ROOT = `http://${address}`;
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
async function open(path, colorScheme, width, height) {
  const page = await (await browser.newContext({ viewport: { width, height }, colorScheme })).newPage();
  page.setDefaultTimeout(120_000);
  await page.goto(ROOT + path);
  return page;
}
async function talk(page) {
  await page.waitForSelector("#members .field", { state: "attached" });
  await page.fill("#prompt", "What is the capital of France?");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".message.assistant:not(.streaming)").length >= 1, null, { timeout: 60000 });
}
{
  const page = await open("/", "light", 1280, 760);
  await talk(page);
  await page.click("#tools-example");
  await page.fill("#prompt", "What is the weather in Oslo?");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".message.assistant:not(.streaming)").length >= 2, null, { timeout: 60000 });
  await page.fill(".call-result", "sunny, 21 degrees");
  await page.screenshot({ path: `${folder}/ui-playground.png` });
}
{
  const page = await open("/", "dark", 1280, 760);
  await page.waitForSelector("#members .field", { state: "attached" });
  await page.selectOption("#alternatives", "3");
  await talk(page);
  await page.locator(".token").nth(5).hover();
  await page.waitForTimeout(200);
  await page.screenshot({ path: `${folder}/ui-playground-dark.png` });
}
{
  const page = await open("/", "light", 360, 720);
  await talk(page);
  await page.screenshot({ path: `${folder}/ui-playground-narrow.png` });
}
// A minute of conversations, so that the plots have lines; some still run when the pictures are taken.
const STEP = 5, STEPS = 14;
function ask(number, tokens) {
  const messages = [{ role: "user", content: `What is ${number % 40} plus ${number % 7}?` }];
  const body = { model: "parley-demo", messages, max_tokens: tokens, ignore_eos: true, stream: true };
  return fetch(`${ROOT}/v1/chat/completions`, { method: "POST", body: JSON.stringify(body) }).then((answer) => answer.text());
}
const answers = [];
for (let step = 0; step < STEPS; step++) {
  const clients = 2 + Math.round(4 * Math.abs(Math.sin(step / 3)));
  for (let client = 0; client < clients; client++) answers.push(ask(step * 7 + client, 100 + 60 * client));
  await new Promise((resolve) => setTimeout(resolve, 1000 * STEP));
}
for (const [scheme, name, width, height] of [["dark", "ui-status.png", 1280, 920], ["light", "ui-status-narrow.png", 360, 720]]) {
  answers.push(...[0, 1, 2].map((number) => ask(number, 3000)));
  const page = await open("/ui/status", scheme, width, height);
  await page.waitForSelector("figure");
  await page.waitForFunction(() => document.querySelectorAll("tbody tr").length >= 2, null, { timeout: 60000 });
  await page.screenshot({ path: `${folder}/${name}` });
}
await Promise.all(answers);
await browser.close();
console.log("good");
