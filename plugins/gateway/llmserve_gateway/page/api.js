// Requests to the gateway that serves this page.

// Browsers do not open more connections to one server; more requests wait in the browser.
export const CONNECTIONS = 6;
let open = 0;

export function isFull() {
  return open >= CONNECTIONS;
}

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function throwError(response) {
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the server responded with status ${response.status}`);
  error.status = response.status;
  throw error;
}

export async function listModels(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) await throwError(response);
  return (await response.json()).data;
}

// Loads or unloads a model that is loaded on demand, and waits until that is done.
export async function order(path, model, key) {
  const response = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify({ model }) });
  if (!response.ok) await throwError(response);
}

// What the key has used on each of the last days, or all keys, if it may see that.
export async function inspect(key) {
  const response = await fetch("/inspect", { headers: headers(key) });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error.message);
  return content.requests;
}

export async function usage(key) {
  const response = await fetch("/usage", { headers: headers(key) });
  if (!response.ok) await throwError(response);
  return (await response.json()).usage;
}

export async function metrics(key) {
  const response = await fetch("/metrics", { headers: headers(key) });
  if (!response.ok) await throwError(response);
  return response.text();
}

export async function rank(body, key, signal) {
  const response = await fetch("/v1/rerank", { method: "POST", headers: headers(key), body: JSON.stringify({ ...body, return_documents: false }), signal }).catch((error) => {
    throw signal.aborted ? error : new Error("the server cannot be reached");
  });
  if (!response.ok) await throwError(response);
  return response.json();
}

// Calls onPiece with each piece of an answer, { text, reasoning, tokens }; returns the finish reason.
export async function generate(path, options, key, signal, onPiece) {
  open += 1;
  try {
    const body = JSON.stringify({ ...options, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
    const response = await fetch(path, { method: "POST", headers: headers(key), body, signal }).catch((error) => {
      throw signal.aborted ? error : new Error("the server cannot be reached");
    });
    if (!response.ok) await throwError(response);
    return await readAnswer(response.body, signal, onPiece);
  } finally {
    open -= 1;
  }
}

async function readAnswer(stream, signal, onPiece) {
  let reason = null;
  try {
    for await (const data of events(stream)) {
      if (data === "[DONE]") return reason ?? "stop";
      const chunk = JSON.parse(data);
      if (chunk.error) throw new AnswerError(chunk.error.message);
      const choice = chunk.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      const reasoning = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      reason = choice?.finish_reason ?? reason;
      if (text || reasoning || choice?.finish_reason) onPiece({ text, reasoning, tokens: chunk.usage?.completion_tokens });
    }
  } catch (error) {
    if (signal.aborted || error instanceof AnswerError) throw error;
  }
  // Without its last event it may lack any part, however well it reads.
  if (!reason) throw new AnswerError("the answer broke off: the connection ended before it did");
  return reason;
}

class AnswerError extends Error {}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data:")) yield part.slice(5).trim();
  }
}
