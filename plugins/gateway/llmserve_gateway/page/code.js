// A request as somebody would write it elsewhere.

// A key itself is not shown: who copies the request may show it to others.
export function asCurl(origin, path, body, keyed) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = keyed ? "  -H \"Authorization: Bearer $OPENAI_API_KEY\" \\\n" : "";
  return `curl ${origin}${path} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${json}'`;
}

export function asPython(origin, path, body, keyed) {
  const call = path.includes("chat") ? "chat.completions" : "completions";
  const given = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`);
  return [
    "from openai import OpenAI", "",
    keyed
      ? `client = OpenAI(base_url="${origin}/v1")  # the key is in OPENAI_API_KEY`
      : `client = OpenAI(base_url="${origin}/v1", api_key="none")`,
    `stream = client.${call}.create(`, ...given, "    stream=True,", ")",
    "for chunk in stream:",
    path.includes("chat")
      ? '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
      : '    print(chunk.choices[0].text, end="", flush=True)',
  ].join("\n");
}

// What is sent here are texts, numbers, lists and objects: JSON is Python for all of them.
function python(value) {
  return JSON.stringify(value);
}
