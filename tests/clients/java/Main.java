// The JDK's HTTP client: java Main.java <base URL> <model>
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import java.util.stream.Stream;

public class Main {
    // It prefers HTTP/2, so the first request to a server asks for an upgrade to h2c.
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String QUESTION = "{\"role\": \"user\", \"content\": \"What is the weather in Paris?\"}";
    static final String WEATHER = """
        "tools": [{"type": "function", "function": {
          "name": "get_weather", "description": "Get the weather of a city", "strict": true,
          "parameters": {"type": "object", "required": ["city"], "additionalProperties": false,
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}}}}]""";
    static final String TEXT = "\"((?:[^\"\\\\]|\\\\.)*)\"";
    static String url, greedy;

    static HttpRequest asking(String body) {
        return HttpRequest.newBuilder(URI.create(url + "/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString("{" + body + "}")).build();
    }

    static String ask(String body) throws Exception {
        return CLIENT.send(asking(body), HttpResponse.BodyHandlers.ofString()).body();
    }

    static Stream<String> events(String body) throws Exception {
        var asked = asking(body + ", \"stream\": true");
        return CLIENT.send(asked, HttpResponse.BodyHandlers.ofLines()).body()
            .filter(line -> line.startsWith("data: {") || line.startsWith("{"));
    }

    /** The value of a field that is a text, as JSON writes it. */
    static String text(String name, String json) {
        var found = Pattern.compile("\"" + name + "\":" + TEXT).matcher(json);
        return found.find() ? found.group(1) : "";
    }

    static String joined(String name, Stream<String> events) {
        return events.map(event -> text(name, event)).collect(Collectors.joining());
    }

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        var model = "\"model\": \"" + arguments[1] + "\", ";
        greedy = model + "\"temperature\": 0, \"max_tokens\": 150, ";
        var first = greedy + WEATHER + ", \"tool_choice\": \"required\", \"messages\": [" + QUESTION + "]";
        var said = ask(first);
        var calledStreamed = joined("arguments", events(first));

        var calls = said.replaceAll("(?s).*\"tool_calls\":(\\[[^\\]]*\\]).*", "$1"); // with their ids
        var assistant = "{\"role\": \"assistant\", \"tool_calls\": " + calls + "}";
        var returned = "{\"role\": \"tool\", \"tool_call_id\": \"%s\", \"content\": \"21 degrees, dry\"}"
            .formatted(text("id", calls));
        var messages = "\"messages\": [" + String.join(", ", QUESTION, assistant, returned) + "]";
        var second = greedy + WEATHER + ", \"tool_choice\": \"none\", " + messages;

        var form = "\"response_format\": {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"weather\", \"schema\": "
            + "{\"type\": \"object\", \"properties\": {\"degrees\": {\"type\": \"number\", \"multipleOf\": 7}}}}}, ";
        var tooLong = greedy + "\"messages\": [{\"role\": \"user\", \"content\": \"" + "Hello. ".repeat(1000) + "\"}]";
        String cancelled;
        try (var story = events(model + "\"n\": 4, \"ignore_eos\": true, \"messages\": [" + QUESTION + "]")) {
            cancelled = text("id", story.skip(4).iterator().next());
        } // which closes the connection
        System.out.printf("{\"chat\": {\"called\": \"%s\", \"called_streamed\": \"%s\", \"answer\": \"%s\", "
            + "\"streamed\": \"%s\", \"refused\": \"%s\", \"too_long\": \"%s\", \"too_long_streamed\": \"%s\", "
            + "\"cancelled\": \"%s\"}}%n", text("arguments", said), calledStreamed, text("content", ask(second)),
            joined("content", events(second)), text("code", ask(greedy + form + "\"messages\": [" + QUESTION + "]")),
            text("code", ask(tooLong)), joined("code", events(tooLong)), cancelled);
    }
}
