// Seconds that llama.cpp takes, with the threads that it is given and everything else as node-llama-cpp has it: prompts as a JSON
// list of lists of ids from standard input, all at a time; `{ "prefill": s, "decode": s }` for each of ROUNDS, as a JSON list,
// to standard output.
//
//     node speed.mjs FOLDER-WITH-NODE-LLAMA-CPP FILE.gguf THREADS TOKENS ROUNDS < prompts.json
//
// Prefill ends when all prompts are computed; decode generates TOKENS tokens after each of them.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, modelPath, threads, count, rounds] = process.argv.slice(2);
const entry = createRequire(pathToFileURL(`${folder}/`)).resolve("node-llama-cpp");
const { getLlama } = await import(pathToFileURL(entry));

const prompts = JSON.parse(readFileSync(0, "utf8"));
const longest = Math.max(...prompts.map((prompt) => prompt.length));
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, logLevel: "error", maxThreads: Number(threads),
});
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
    sequences: prompts.length,
    contextSize: longest + Number(count) + 16,
    batchSize: longest * prompts.length,
    threads: Number(threads),
});
const sequences = prompts.map(() => context.getSequence());

async function generate(sequence, last) {
    let left = Number(count);
    // A token that ends a text is a token like others here.
    const options = { temperature: 0, yieldEogToken: true };
    for await (const _token of sequence.evaluate([last], options)) {
        left -= 1;
        if (left === 0) return;
    }
    throw new Error(`the text ended ${left} tokens too early`);
}

const results = [];
for (let round = 0; round < Number(rounds); round += 1) {
    for (const sequence of sequences) await sequence.clearHistory();
    const start = performance.now();
    await Promise.all(
        sequences.map((sequence, i) => sequence.evaluateWithoutGeneratingNewTokens(prompts[i].slice(0, -1))),
    );
    const computed = performance.now();
    await Promise.all(sequences.map((sequence, i) => generate(sequence, prompts[i].at(-1))));
    const done = performance.now();
    results.push({ prefill: (computed - start) / 1000, decode: (done - computed) / 1000 });
}
process.stdout.write(JSON.stringify(results));
await llama.dispose();
