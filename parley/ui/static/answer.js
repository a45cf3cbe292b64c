// An answer while it arrives, whichever API it comes from. Adapters of APIs call its methods.

export class Answer {
  constructor(onchange = () => {}) {
    this.text = "";
    this.reasoning = "";
    this.calls = []; // {id, name, text}: the arguments as JSON text
    this.tokens = []; // {token, logprob, top}
    this.kept = {}; // what an API wants back in the next turn
    this.reason = "";
    this.error = "";
    this.promptTokens = this.outputTokens = null;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.seconds = null; // set at the end
    this._numbers = []; // of the calls in the API's counting
    this._onchange = onchange;
  }

  addText(text) {
    if (!text) return;
    this.text += text;
    this._arrive();
  }

  replaceText(text) {
    this.text = text;
    this._arrive();
  }

  addReasoning(text) {
    if (!text) return;
    this.reasoning += text;
    this._arrive();
  }

  addCall(number, { id, name, text }) {
    let at = this._numbers.indexOf(number);
    if (at < 0) {
      at = this._numbers.push(number) - 1;
      this.calls.push({ id: id ?? `call_${at}`, name: "", text: "" });
    }
    const call = this.calls[at];
    if (id) call.id = id;
    if (name) call.name = name;
    if (text) call.text += text;
    this._arrive();
  }

  addTokens(tokens) {
    if (tokens?.length) this.tokens.push(...tokens.filter((each) => each.token !== null && each.token !== undefined));
  }

  keep(name, value) {
    this.kept[name] = value;
  }

  finish(reason) {
    if (reason) this.reason = reason;
  }

  fail(message) {
    this.error = message || "The server reported an error.";
    this._onchange();
  }

  count(prompt, output) {
    if (prompt !== undefined && prompt !== null) this.promptTokens = prompt;
    if (output !== undefined && output !== null) this.outputTokens = output;
  }

  end() {
    this.seconds = (performance.now() - this.startedAt) / 1000;
  }

  _arrive() {
    this.firstAt ??= performance.now();
    this._onchange();
  }

  /** Return the message that a conversation keeps. */
  toMessage() {
    const ttft = this.firstAt === null ? null : (this.firstAt - this.startedAt) / 1000;
    const { text, reasoning, calls, tokens, kept, reason, error, promptTokens, outputTokens, seconds } = this;
    return { role: "assistant", text, reasoning, calls, tokens, kept, reason, error, promptTokens, outputTokens, seconds, ttft };
  }
}
