// Requests to the gateway that this page came from.

function headers(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function refuse(response) {
  const told = await response.json().catch(() => null);
  const error = new Error(told?.error?.message ?? `the server answered ${response.status}`);
  error.status = response.status;
  throw error;
}

export async function listModels(key) {
  const response = await fetch("/v1/models", { headers: headers(key) });
  if (!response.ok) await refuse(response);
  return (await response.json()).data;
}

export async function metrics(key) {
  const response = await fetch("/metrics", { headers: headers(key) });
  if (!response.ok) await refuse(response);
  return response.text();
}

// Ask, and give each piece of text with the count of tokens so far; return why the answer ended.
export async function ask(path, body, key, signal, take) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(asked), signal });
  if (!response.ok) await refuse(response);
  let reason = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    reason = choice?.finish_reason ?? reason;
    if (text || choice?.finish_reason) take(text, chunk.usage?.completion_tokens);
  }
  return reason;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (left + value).split("\n\n");
    left = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
