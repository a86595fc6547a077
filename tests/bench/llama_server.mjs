// Completions of llama.cpp as an OpenAI endpoint, as much of it as the bench of peers asks for.
//     node llama_server.mjs FILE PORT SEQUENCES
import {createServer} from "node:http";
import {getLlama} from "node-llama-cpp";

const [file, port, most] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false});
const model = await llama.loadModel({modelPath: file});
// As many requests as arrive at once are computed together.
const context = await model.createContext({sequences: Number(most), contextSize: 1024});
const free = Array.from({length: Number(most)}, () => context.getSequence());
const waiting = [];

async function withSequence(use) {
    const sequence = free.pop() ?? await new Promise((resolve) => waiting.push(resolve));
    try {
        await sequence.clearHistory();
        await use(sequence);
    } finally {
        const next = waiting.shift();
        if (next) next(sequence);
        else free.push(sequence);
    }
}

// Greedy, and never ended by an end token: all answers of a measurement have one length.
async function* answer(sequence, tokens, length) {
    let count = 0;
    for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        yield model.detokenize([token]);
        if (++count >= length) return;
    }
}

async function complete(request, response) {
    const body = JSON.parse(Buffer.concat(await request.toArray()).toString());
    const tokens = model.tokenize(body.prompt);
    const usage = {prompt_tokens: tokens.length, completion_tokens: body.max_tokens};
    const choice = (text, reason) => ({index: 0, text, finish_reason: reason});
    const send = (choices, more) =>
        response.write(`data: ${JSON.stringify({object: "text_completion", choices, ...more})}\n\n`);
    response.setHeader("content-type", body.stream ? "text/event-stream" : "application/json");
    await withSequence(async (sequence) => {
        const pieces = [];
        for await (const piece of answer(sequence, tokens, body.max_tokens)) {
            if (body.stream) send([choice(piece, null)]);
            pieces.push(piece);
        }
        if (!body.stream) {
            const choices = [choice(pieces.join(""), "length")];
            response.end(JSON.stringify({object: "text_completion", choices, usage}));
            return;
        }
        send([choice("", "length")]);
        send([], {usage});
        response.end("data: [DONE]\n\n");
    });
}

createServer((request, response) => {
    if (request.method === "GET") {
        response.setHeader("content-type", "application/json");
        response.end(JSON.stringify({object: "list", data: [{id: "real", object: "model"}]}));
        return;
    }
    complete(request, response).catch((error) => {
        console.error(error);
        response.destroy();
    });
}).listen(Number(port), "127.0.0.1");
