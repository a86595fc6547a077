// The current request as code for other programs.

// The key itself is not included, because users may share the code.
export function asCurl(origin, path, body, keyed) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = keyed ? "  -H \"Authorization: Bearer $OPENAI_API_KEY\" \\\n" : "";
  return `curl ${origin}${path} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${json}'`;
}

export function asPython(origin, path, body, keyed) {
  const call = path.includes("chat") ? "chat.completions" : "completions";
  const options = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`);
  return [
    "from openai import OpenAI", "",
    keyed
      ? `client = OpenAI(base_url="${origin}/v1")  # the key is in OPENAI_API_KEY`
      : `client = OpenAI(base_url="${origin}/v1", api_key="none")`,
    `stream = client.${call}.create(`, ...options, "    stream=True,", ")",
    "for chunk in stream:",
    path.includes("chat")
      ? '    print(chunk.choices[0].delta.content or "", end="", flush=True)'
      : '    print(chunk.choices[0].text, end="", flush=True)',
  ].join("\n");
}

// The values are strings, numbers, lists and objects, whose JSON is valid Python.
function python(value) {
  return JSON.stringify(value);
}
