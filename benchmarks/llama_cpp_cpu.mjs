// llama.cpp's decoding by the type of its cache, as an outsider's yardstick: node llama_cpp_cpu.mjs MODEL.gguf THREADS "256 8192" "F16 Q8_0 Q4_0" ROUNDS
// Needs `npm install node-llama-cpp`. Prints one JSON line: seconds of a decoded token behind each number of tokens, median of 32 steps, best of the rounds.
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const [file, threads, lengths, types, rounds] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const median = (x) => x.sort((a, b) => a - b)[x.length >> 1];
const found = [];
for (const length of lengths.split(" ").map(Number)) {
    const least = {};
    for (let round = 0; round < Number(rounds); round++)
        for (const type of types.split(" ")) {
            const context = await model.createContext({
                contextSize: length + 64, sequences: 1, batchSize: 512, threads: Number(threads), flashAttention: true,
                experimentalKvCacheKeyType: type, experimentalKvCacheValueType: type
            });
            const sequence = context.getSequence(), steps = [];
            const tokens = Array.from({length}, (_, i) => 100 + (i * 7919) % 20000);
            const began = performance.now();
            await sequence.evaluateWithoutGeneratingNewTokens(tokens.slice(0, -1));
            const prompt = (performance.now() - began) / 1000;
            let last = performance.now();
            for await (const token of sequence.evaluate([tokens.at(-1)], {temperature: 0, yieldEogToken: true})) {
                const now = performance.now();
                steps.push((now - last) / 1000);
                last = now;
                if (steps.length === 32) break;
            }
            await context.dispose();
            const step = median(steps);
            if (!(least[type]?.step_s < step)) least[type] = {step_s: step, prompt_s: prompt};
        }
    for (const [type, times] of Object.entries(least)) found.push({cache: type.toLowerCase(), length, ...times});
}
console.log(JSON.stringify({model: file.split("/").at(-1), threads: Number(threads), found}));
process.exit(0);
