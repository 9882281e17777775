//! The errors that clients get for wrong requests.

use std::sync::Arc;

use host_front::text::ChatTemplate;
use serde_json::{Value, json};

use super::client::send;
use super::fixture::{Front, config};

#[tokio::test]
async fn wrong_requests_are_refused_by_name() {
    let (front, _prefill, decode) = Front::echoing().await;
    let with = |field: &str, value: Value| {
        let mut body = json!({"model": "fake", "prompt": "abc"});
        body[field] = value;
        body
    };
    let chat = |message: Value| json!({"messages": [message]});
    let path = "/v1/completions";
    let chat_path = "/v1/chat/completions";
    let cases: Vec<(&str, Value, u16, Value, &str)> = vec![
        (
            path,
            with("model", json!("gpt")),
            404,
            json!("model"),
            "\"gpt\" is not served here; this server has \"fake\"",
        ),
        (
            path,
            with("max_tokens", json!(0)),
            400,
            json!("max_tokens"),
            "max_tokens is 0, which asks for nothing",
        ),
        (path, with("max_tokens", json!(-1)), 400, json!("max_tokens"), "got -1"),
        (path, with("max_tokens", json!(1.5)), 400, json!("max_tokens"), "got 1.5"),
        (
            path,
            with("max_tokens", json!(510)),
            400,
            Value::Null,
            "holds 512 tokens, but the prompt has 3 and max_tokens is 510, 513 in all",
        ),
        (
            path,
            with("prompt", json!("x".repeat(600))),
            400,
            Value::Null,
            "holds 512 tokens, but the prompt has 600",
        ),
        (
            "/generate",
            json!({"text": "abc", "sampling_params": {"max_new_tokens": 510}}),
            400,
            Value::Null,
            "the prompt has 3 and sampling_params.max_new_tokens is 510, 513 in all; shorten the prompt or lower \
             sampling_params.max_new_tokens",
        ),
        (
            chat_path,
            json!({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 600}),
            400,
            Value::Null,
            "and max_completion_tokens is 600",
        ),
        (
            path,
            with("cache_salt", json!("s".repeat(257))),
            400,
            json!("cache_salt"),
            "a string of up to 256 bytes, got a string of 257 bytes",
        ),
        (path, with("prompt", json!("")), 400, json!("prompt"), "prompt is empty"),
        (path, with("prompt", json!([])), 400, json!("prompt"), "prompt is empty"),
        (path, with("prompt", json!([1, 300])), 400, json!("prompt"), "token ids from 0 to 299, got 300"),
        (path, with("prompt", json!(["a", ""])), 400, json!("prompt"), "prompt is empty"),
        (
            path,
            with("prompt", json!(["a", 5])),
            400,
            json!("prompt"),
            "a list of token ids, or a list of either",
        ),
        (
            path,
            with("prompt", json!(vec!["a"; 129])),
            400,
            json!("prompt"),
            "129 entries, and 128 is the limit",
        ),
        (
            path,
            with("prompt", json!({"a": 1})),
            400,
            json!("prompt"),
            "must be a string, a list of token ids, or a list of either",
        ),
        (path, with("prompt", Value::Null), 400, json!("prompt"), "prompt is missing"),
        (path, with("n", json!(129)), 400, json!("n"), "from 1 to 128, got 129"),
        (
            path,
            json!({"prompt": ["a", "b", "c"], "n": 60}),
            400,
            Value::Null,
            "180 answers, and 128 is the limit",
        ),
        (
            path,
            json!({"prompt": vec![97; 20_000], "n": 128}),
            400,
            Value::Null,
            "have 2560000 tokens of prompts, counted once for each answer, and 2097152 is the limit",
        ),
        (path, json!({"prompt": "a", "n": 3, "best_of": 2}), 400, json!("best_of"), "it must be n or more"),
        (
            path,
            json!({"prompt": "a", "best_of": 2, "stream": true}),
            400,
            json!("best_of"),
            "leave stream out",
        ),
        (
            path,
            with("temperature", json!(2.1)),
            400,
            json!("temperature"),
            "temperature must be a number from 0 to 2, got 2.1",
        ),
        (path, with("temperature", json!("hot")), 400, json!("temperature"), "got \"hot\""),
        (path, with("top_p", json!(0)), 400, json!("top_p"), "above 0 and up to 1"),
        (path, with("top_k", json!(-2)), 400, json!("top_k"), "got -2"),
        (path, with("logprobs", json!(6)), 400, json!("logprobs"), "from 0 to 5"),
        (path, with("stop", json!(vec!["1"; 17])), 400, json!("stop"), "up to 16 strings"),
        (path, with("stop", json!([""])), 400, json!("stop"), "1 to 1024 bytes"),
        (path, with("stream", json!("yes")), 400, json!("stream"), "true or false"),
        (
            path,
            with("stream_options", json!({})),
            400,
            json!("stream_options"),
            "only for requests with stream",
        ),
        (path, with("presence_penalty", json!(2.5)), 400, json!("presence_penalty"), "from -2 to 2"),
        (path, with("frequency_penalty", json!(-3)), 400, json!("frequency_penalty"), "from -2 to 2"),
        (path, with("repetition_penalty", json!(0)), 400, json!("repetition_penalty"), "above 0"),
        (path, with("min_p", json!(1.5)), 400, json!("min_p"), "from 0 to 1"),
        (
            path,
            with("min_tokens", json!(17)),
            400,
            json!("min_tokens"),
            "min_tokens is 17, and max_tokens is 16",
        ),
        (path, with("logit_bias", json!({"300": 1})), 400, json!("logit_bias"), "token ids from 0 to 299"),
        (path, with("logit_bias", json!({"5": "x"})), 400, json!("logit_bias"), "an object with numbers"),
        (path, with("priority", json!(3_000_000_000_u64)), 400, json!("priority"), "from -2147483648"),
        (path, with("timeout", json!(0)), 400, json!("timeout"), "above 0"),
        (path, json!([1]), 400, Value::Null, "must be a JSON object, got [1]"),
        (chat_path, json!({"messages": []}), 400, json!("messages"), "at least one message"),
        (
            chat_path,
            chat(json!({"role": "king", "content": "x"})),
            400,
            json!("messages[0].role"),
            "one of system",
        ),
        (chat_path, chat(json!({"role": "user"})), 400, json!("messages[0].content"), "a string or a list"),
        (
            chat_path,
            chat(json!({"role": "user", "content": [{"type": "image_url"}]})),
            400,
            json!("messages[0].content"),
            "no images",
        ),
        (
            chat_path,
            json!({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}),
            400,
            json!("top_logprobs"),
            "needs logprobs",
        ),
        (
            chat_path,
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
            400,
            json!("tools"),
            "cannot be offered tools",
        ),
        (
            path,
            with("max_tokens", json!(5_000_000_000_u64)),
            400,
            json!("max_tokens"),
            "from 0 to 4294967295, got",
        ),
        (path, with("allowed_token_ids", json!([300])), 400, json!("allowed_token_ids"), "token ids from 0"),
        (path, with("bad_words", json!([" "])), 400, json!("bad_words"), "strings of 1 to 256 bytes"),
        (path, with("logits_processors", json!(["x"])), 400, json!("logits_processors"), "not supported"),
        (path, with("add_special_tokens", json!(1)), 400, json!("add_special_tokens"), "true or false"),
        (
            path,
            with("truncate_prompt_tokens", json!(5)),
            400,
            json!("truncate_prompt_tokens"),
            "not known here, got 5",
        ),
        (
            path,
            with("temprature", json!(0.5)),
            400,
            json!("temprature"),
            "temprature is not known here, got 0.5",
        ),
        (path, with("tool_choice", json!("required")), 400, json!("tool_choice"), "not supported"),
        (
            path,
            json!({"prompt": "a", "stream": true, "stream_options": {"include_usage": "yes"}}),
            400,
            json!("stream_options.include_usage"),
            "true or false",
        ),
        (
            path,
            json!({"prompt": "a", "stream": true, "stream_options": {"usages": true}}),
            400,
            json!("stream_options.usages"),
            "not known here",
        ),
        (
            chat_path,
            json!({"messages": [{"role": "user", "content": "x"}], "continue_final_message": true}),
            400,
            json!("continue_final_message"),
            "not supported",
        ),
        (
            "/generate",
            json!({"text": "a", "temperature": 0}),
            400,
            json!("temperature"),
            "put it into sampling_params",
        ),
        (
            "/generate",
            json!({"text": "a", "max_new_tokens": 5}),
            400,
            json!("max_new_tokens"),
            "into sampling_params",
        ),
        (
            "/generate",
            json!({"text": "a", "sampling_parms": {"n": 1}}),
            400,
            json!("sampling_parms"),
            "not known here",
        ),
        (
            "/generate",
            json!({"text": "a", "sampling_params": {"temprature": 1}}),
            400,
            json!("sampling_params.temprature"),
            "not known here",
        ),
        ("/generate", json!({"text": "a", "input_ids": [1]}), 400, json!("text"), "either text or input_ids"),
        (
            "/generate",
            json!({"text": ["a", "b"], "sampling_params": [{}]}),
            400,
            json!("sampling_params"),
            "a JSON object, or one for each prompt",
        ),
        (
            "/generate",
            json!({"text": "abc", "return_logprob": true, "logprob_start_len": 4}),
            400,
            json!("logprob_start_len"),
            "the prompt has 3 tokens",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "assistant", "content": "a", "tool_calls": {}}]}),
            400,
            json!("messages[0].tool_calls"),
            "must be a list of calls",
        ),
        ("/generate", json!({"text": "a", "lora_path": "x"}), 400, json!("lora_path"), "not supported"),
        ("/generate", json!({}), 400, json!("text"), "prompt is missing"),
        (
            "/generate",
            json!({"text": "a", "sampling_params": {"temperature": -1}}),
            400,
            json!("sampling_params.temperature"),
            "sampling_params.temperature must be",
        ),
    ];
    for (path, body, status, param, sentence) in cases {
        let reply = front.post(path, &body).await;
        let got = reply.status;
        let error = reply.json().await["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert_eq!((got, &error["param"]), (status, &param), "{path} {body}: {message}");
        assert!(message.contains(sentence), "{path}: {message:?} should say {sentence:?}");
        assert_eq!(error["type"], "invalid_request_error");
        if sentence.contains("holds 512") {
            assert_eq!(error["code"], "context_length_exceeded");
        }
    }
    assert!(decode.watch.calls().is_empty(), "no worker was bothered");
}

#[tokio::test]
async fn fields_that_ask_for_nothing_are_accepted() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let body = json!({"prompt": ["abc"], "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "echo": false, "suffix": null, "top_k": -1, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"}, "stream_options": null, "made_up": null, "allowed_token_ids": [], "add_special_tokens": true,
        "continue_final_message": false, "user": "me", "metadata": {"x": [1]}, "store": true, "max_tokens": 509.0,
        "made_up_0": 0, "made_up_1": false, "made_up_2": "", "made_up_3": [], "made_up_4": {}});
    assert_eq!(front.post("/v1/completions", &body).await.status, 200);
    let tools = json!({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}], "tool_choice": "none"});
    assert_eq!(front.post("/v1/chat/completions", &tools).await.status, 200);
    // The form in which SGLang's benchmark sends a request.
    let body = json!({"text": "a", "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": true},
        "stream": true, "lora_path": null, "return_logprob": false, "return_routed_experts": false,
        "logprob_start_len": -1});
    assert_eq!(front.post("/generate", &body).await.events().await.len(), 4);
    let body = json!({"text": "a", "lora_path": "", "image_data": [], "return_logprob": false,
        "sampling_params": {"max_new_tokens": 1, "skip_special_tokens": true, "n": 1}});
    assert_eq!(front.post("/generate", &body).await.status, 200);
}

#[tokio::test]
async fn bodies_that_are_not_json_are_refused_with_a_sentence() {
    let (front, _prefill, _decode) = Front::echoing().await;
    for (body, sentence) in
        [("{\"prompt\": ", "not valid JSON: EOF"), ("", "not valid JSON"), ("\u{1}", "not valid JSON")]
    {
        let reply = send(front.http, "POST", "/v1/completions", &[], body.as_bytes()).await;
        assert_eq!(reply.status, 400);
        let message = reply.json().await["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(sentence), "{message}");
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_however_it_is_announced() {
    let mut config = config();
    config.max_body = 1000;
    let front = Front::start(config).await;
    let reply = send(front.http, "POST", "/v1/completions", &[], &[b' '; 1001]).await;
    assert_eq!(reply.status, 413);
    assert!(reply.json().await["error"]["message"].as_str().unwrap().contains("larger than 1000 bytes"));

    // The same without a length, in chunks.
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut connection = tokio::net::TcpStream::connect(front.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    connection.write_all(format!("{head}3e9\r\n{}\r\n", " ".repeat(1001)).as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("larger than 1000 bytes"), "{answer}");
}

#[tokio::test]
async fn chat_without_a_template_says_what_to_do() {
    let mut config = config();
    config.text.template = None;
    let front = Front::start(config).await;
    let reply =
        front.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "x"}]})).await;
    assert_eq!(reply.status, 400);
    let message = reply.json().await["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("has no chat template: use /v1/completions"), "{message}");
}

/// Some templates take a system message at the beginning alone. Agents also send them later.
#[tokio::test]
async fn what_a_template_refuses_is_refused_in_its_own_words() {
    const TEMPLATE: &str = "{% for message in messages %}{% if message.role == 'system' and not loop.first %}\
        {{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ message.content }}{% endfor %}";
    let mut config = config();
    config.text.template =
        Some(Arc::new(ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).unwrap()));
    let front = Front::start(config).await;
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "developer", "content": "Now."}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/responses", json!({"input": messages})),
    ] {
        let reply = front.post(path, &body).await;
        assert_eq!(reply.status, 400);
        assert_eq!(
            reply.json().await["error"]["message"],
            "the chat template refused the messages: System message must be at the beginning.",
            "{path}"
        );
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_answer_in_the_same_shape() {
    let front = Front::start(config()).await;
    for (method, path, status) in [
        ("GET", "/v2", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/gpt", 404),
        ("GET", "/v1/models/%FF", 400),
    ] {
        let reply = send(front.http, method, path, &[], b"").await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.json().await["error"]["type"], "invalid_request_error");
    }
}

/// A client chooses the length of what it sends. Answers that repeated all of it would be long, and be kept until they are read.
#[tokio::test]
async fn refusals_do_not_repeat_long_texts_of_their_clients() {
    let (front, _prefill, _decode) = Front::echoing().await;
    let long = "\"".repeat(6000);
    let (name, path) = (format!("http://{}", "x".repeat(6000)), format!("/{}", "x".repeat(6000)));
    let json = json!({"model": "x".repeat(6000), "prompt": "abc"}).to_string();
    let headers = |name: &'static str, value: &str| vec![(name, value.to_owned())];
    let cases = [
        ("GET", "/v1/models", headers("origin", &long), "", 403),
        ("GET", "/v1/models", headers("origin", &name), "", 403),
        ("POST", "/v1/completions", headers("content-type", &long), "{}", 415),
        ("GET", path.as_str(), headers("accept", "*/*"), "", 404),
        (&path[1..], "/health", headers("accept", "*/*"), "", 405),
        ("POST", "/v1/completions", headers("content-type", "application/json"), json.as_str(), 404),
    ];
    for (method, path, headers, body, status) in cases {
        let headers: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let reply = send(front.http, method, path, &headers, body.as_bytes()).await;
        assert_eq!(reply.status, status, "{} {}", &method[..3], &path[..8.min(path.len())]);
        let text = reply.text().await;
        assert!(text.len() < 1024, "{status}: {} bytes", text.len());
        assert!(text.contains('…'), "{text}");
    }
}
