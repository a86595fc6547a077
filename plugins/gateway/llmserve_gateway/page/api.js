// Requests to the gateway that serves this page.

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

export async function metrics(key) {
  const response = await fetch("/metrics", { headers: headers(key) });
  if (!response.ok) await throwError(response);
  return response.text();
}

// Calls onPiece with each piece of text and the token count so far; returns the finish reason.
export async function generate(path, options, key, signal, onPiece) {
  const body = JSON.stringify({ ...options, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  const response = await fetch(path, { method: "POST", headers: headers(key), body, signal });
  if (!response.ok) await throwError(response);
  let reason = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    reason = choice?.finish_reason ?? reason;
    if (text || choice?.finish_reason) onPiece(text, chunk.usage?.completion_tokens);
  }
  return reason;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
