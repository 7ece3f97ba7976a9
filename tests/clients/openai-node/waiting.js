// A stream that waits, by the SDK's helpers: node waiting.js <base URL> <model> <chat | responses>
import OpenAI from "openai";

const [baseURL, model, api] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

async function chat() {
  const messages = [{ role: "user", content: "Hello" }];
  const stream = client.chat.completions.stream({ model, messages });
  return (await stream.finalMessage()).tool_calls[0].function.arguments;
}

async function responses() {
  const stream = client.responses.stream({ model, input: "Hello" });
  return (await stream.finalResponse()).output[0].arguments;
}

console.log(await { chat, responses }[api]());
