// A stream that waits, by the SDK's helpers: node waiting.js <base URL> <model>
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const stream = client.messages.stream({ model, messages, max_tokens: 64 });
const [block] = (await stream.finalMessage()).content;
console.log(JSON.stringify(block.input));
