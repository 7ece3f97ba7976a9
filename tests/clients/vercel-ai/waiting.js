// A stream that waits: node waiting.js <base URL> <model> <chat | responses | messages>
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { jsonSchema, streamText, tool } from "ai";

const [baseURL, model, api] = process.argv.slice(2);
const make = api === "messages" ? createAnthropic : createOpenAI;
const provider = make({ baseURL, apiKey: "none" });
const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } } });
const stream = streamText({
  model: provider[api](model), prompt: "Hello", tools: { f: tool({ inputSchema }) },
  maxOutputTokens: 64, maxRetries: 0,
});
const parts = [];
for await (const part of stream.fullStream) {
  if (part.type === "error") throw part.error;
  if (part.type === "tool-input-delta") parts.push(part.delta);
}
console.log(parts.join(""));
