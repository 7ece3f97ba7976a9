// Vercel's AI SDK, with both of its providers for OpenAI: node main.js <base URL> <model>
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAI({ baseURL, apiKey: "none" });
// What the SDK has no option for is added to the body on its way.
const ignoringEnd = createOpenAI({
  baseURL,
  apiKey: "none",
  fetch: (url, { body, ...rest }) =>
    fetch(url, { ...rest, body: JSON.stringify({ ...JSON.parse(body), ignore_eos: true }) }),
});
const prompt = "What is the weather in Paris?";
const weather = tool({
  description: "Get the weather of a city",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  strict: true,
  execute: async () => ({ degrees: 21, dry: true }),
});
const codeOf = (error) => error.data?.error.code ?? String(error);

async function run(model, endless) {
  const greedy = { model, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
  // The SDK calls the tool and sends its result: two requests for each of these.
  const twoSteps = {
    ...greedy, prompt, tools: { weather }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  };
  const { steps, text: answer, response } = await generateText(twoSteps);
  const streaming = streamText(twoSteps);
  const streamed = await streaming.text;
  const called = (step) => step.toolCalls[0].input;

  const more = [{ role: "user", content: "And in Rome?" }];
  const messages = [{ role: "user", content: prompt }, ...response.messages, ...more];
  const { text: further } = await generateText({ ...greedy, messages });

  const schema = z.object({ degrees: z.number().multipleOf(7) });
  const wrong = { ...greedy, prompt, output: Output.object({ schema }) };
  const refused = await generateText(wrong).then(() => "none", codeOf);
  const long = { ...greedy, prompt: "Hello. ".repeat(1000) };
  const too_long = await generateText(long).then(() => "none", codeOf);
  let too_long_streamed = "none";
  const failing = streamText({ ...long, onError: ({ error }) => (too_long_streamed = codeOf(error)) });
  await failing.consumeStream();

  const controller = new AbortController();
  const story = { model: endless, prompt, abortSignal: controller.signal, includeRawChunks: true };
  let cancelled, deltas = 0;
  for await (const part of streamText(story).fullStream) {
    if (part.type === "raw") cancelled ??= part.rawValue.response?.id ?? part.rawValue.id;
    if (part.type === "text-delta" && ++deltas === 5) controller.abort();
  }
  return {
    called: called(steps[0]), called_streamed: called((await streaming.steps)[0]),
    answer, streamed, further, refused, too_long, too_long_streamed, cancelled,
  };
}

const chat = await run(provider.chat(name), ignoringEnd.chat(name));
const responses = await run(provider.responses(name), ignoringEnd.responses(name));
console.log(JSON.stringify({ chat, responses }));
