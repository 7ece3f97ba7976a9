// OpenAI's own SDK for JavaScript: node main.js <base URL> <model>
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const weather = {
  name: "get_weather", description: "Get the weather of a city", strict: true,
  parameters: {
    type: "object", required: ["city"], additionalProperties: false,
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  },
};
const question = [{ role: "user", content: "What is the weather in Paris?" }];
const result = JSON.stringify({ degrees: 21, dry: true });
const schema = { type: "object", properties: { degrees: { type: "number", multipleOf: 7 } } };
const tooLong = "Hello. ".repeat(1000);
const codeOf = (request) => request.then(() => "none", (error) => error.code);

async function chat() {
  const { completions } = client.chat;
  const tools = [{ type: "function", function: weather }];
  const greedy = { model, temperature: 0, max_completion_tokens: 150 };
  const first = { ...greedy, tools, messages: question, tool_choice: "required" };
  const { message } = (await completions.create(first)).choices[0];
  const again = await completions.stream(first).finalMessage();
  const returned = { role: "tool", tool_call_id: message.tool_calls[0].id, content: result };
  const messages = [...question, message, returned];
  const second = { ...greedy, tools, messages, tool_choice: "none" };
  const answer = (await completions.create(second)).choices[0].message.content;
  const streamed = await completions.stream(second).finalContent();

  const response_format = { type: "json_schema", json_schema: { name: "weather", schema } };
  const long = { ...greedy, messages: [{ role: "user", content: tooLong }] };
  const refused = await codeOf(completions.create({ ...greedy, messages, response_format }));
  const too_long = await codeOf(completions.create(long));
  const too_long_streamed = await codeOf(completions.create({ ...long, stream: true }));

  const story = { model, messages: question, n: 4, ignore_eos: true, stream: true };
  let cancelled;
  for await (cancelled of await completions.create(story)) break; // which closes the connection
  const called = (said) => JSON.parse(said.tool_calls[0].function.arguments);
  const told = { called: called(message), called_streamed: called(again), answer, streamed };
  return { ...told, refused, too_long, too_long_streamed, cancelled: cancelled.id };
}

async function responses() {
  const { responses } = client;
  const tools = [{ type: "function", ...weather }];
  const greedy = { model, temperature: 0, max_output_tokens: 150 };
  const first = { ...greedy, tools, input: question, tool_choice: "required" };
  const { output } = await responses.create(first);
  const again = await responses.stream(first).finalResponse();
  const callIn = (items) => items.find((item) => item.type === "function_call");
  const { call_id } = callIn(output);
  const returned = { type: "function_call_output", call_id, output: result };
  const input = [...question, ...output, returned];
  const second = { ...greedy, tools, input, tool_choice: "none" };
  const answer = (await responses.create(second)).output_text;
  const streamed = (await responses.stream(second).finalResponse()).output_text;

  const text = { format: { type: "json_schema", name: "weather", schema } };
  const refused = await codeOf(responses.create({ ...greedy, input: question, text }));
  const too_long = await codeOf(responses.create({ ...greedy, input: tooLong }));
  const too_long_streamed = await codeOf(responses.create({ model, input: tooLong, stream: true }));

  const telling = await responses.create({ model, input: question, ignore_eos: true, stream: true });
  let cancelled;
  for await (const event of telling) {
    cancelled ??= event.response?.id;
    if (event.sequence_number === 8) telling.controller.abort();
  }
  const called = (items) => JSON.parse(callIn(items).arguments);
  const told = { called: called(output), called_streamed: called(again.output), answer, streamed };
  return { ...told, refused, too_long, too_long_streamed, cancelled };
}

console.log(JSON.stringify({ chat: await chat(), responses: await responses() }));
