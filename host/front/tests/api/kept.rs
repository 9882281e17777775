//! What a router keeps of answers while they are sent counts in the client's share.

use std::sync::Arc;

use host_front::text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::fake_worker::{FakeWorker, Script, Step, steps};
use super::fixture::{Front, config};

/// Bytes of answers that this server keeps. A client alone has four fifths of them.
const MOST: usize = 80_000;
/// Tokens of the answer. With 20 log probabilities each takes some 220 bytes, and eight times as many as JSON.
const TOKENS: usize = 400;

fn answer() -> Script {
    let tokens = (0..TOKENS).map(|_| Step::Token(97));
    steps(tokens.chain([Step::Finish("stop")]).collect())
}

/// A router with a worker, and the lines of an answer.
async fn stream(path: &str, body: &Value) -> (Front, String) {
    let mut config = config();
    config.max_answer_bytes = MOST;
    let mut front = Front::start(config).await;
    let worker = front.worker("all", "aggregated", answer()).await;
    let text = front.post(path, body).await.text().await;
    drop(worker);
    (front, text)
}

#[tokio::test]
async fn a_stream_that_repeats_more_than_the_clients_share_ends_with_the_reason() {
    let generate = json!({
        "text": "abc", "stream": true, "return_logprob": true, "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": TOKENS},
    });
    let responses = json!({
        "input": "abc", "stream": true, "include": ["message.output_text.logprobs"], "top_logprobs": 20,
        "max_output_tokens": TOKENS,
    });
    for (path, body) in [("/generate", generate), ("/v1/responses", responses)] {
        let (front, text) = stream(path, &body).await;
        let end = text.rsplit_once("data: ").unwrap().1;
        assert!(end.contains("bytes of answers under way"), "{path}: {end:.300}");
        front.until_metrics_say("host_answer_bytes 0\n").await;
    }
}

#[tokio::test]
async fn a_stream_that_repeats_nothing_keeps_nothing() {
    let chat = json!({
        "messages": [{"role": "user", "content": "abc"}], "stream": true, "logprobs": true, "top_logprobs": 20,
        "max_tokens": TOKENS, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    });
    let completions = json!({"prompt": "abc", "stream": true, "logprobs": 5, "max_tokens": TOKENS});
    for (path, body) in [("/v1/chat/completions", chat), ("/v1/completions", completions)] {
        let (front, text) = stream(path, &body).await;
        assert!(
            text.ends_with("data: [DONE]\n\n"),
            "{path}: {:.300}",
            &text[text.len().saturating_sub(300)..]
        );
        let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: {"));
        let events: Vec<Value> =
            events.map(|event| serde_json::from_str(&format!("{{{event}")).unwrap()).collect();
        let with_logprobs = events.iter().filter(|event| event["choices"][0]["logprobs"].is_object());
        assert!(with_logprobs.clone().count() >= TOKENS, "{path}: {} events", events.len());
        if path == "/v1/chat/completions" {
            assert!(
                with_logprobs.clone().all(|event| event["usage"]["completion_tokens"].is_u64()),
                "{path}"
            );
        }
        front.until_metrics_say("host_answer_bytes 0\n").await;
    }
}

#[tokio::test]
async fn a_whole_answer_with_log_probabilities_counts_as_many_bytes_as_it_is_written_with() {
    let chat = json!({
        "messages": [{"role": "user", "content": "abc"}], "logprobs": true, "top_logprobs": 20, "max_tokens": TOKENS,
    });
    let (front, text) = stream("/v1/chat/completions", &chat).await;
    assert!(text.contains("80000 bytes") || text.contains("answers that it has not read"), "{text:.300}");
    front.until_metrics_say("host_answer_bytes 0\n").await;
}

#[tokio::test]
async fn the_prompt_of_a_running_request_counts_in_its_clients_share() {
    let mut config = config();
    config.max_text_bytes = 1_000_000;
    let mut front = Front::start(config).await;
    let mut worker = FakeWorker::start("all", "aggregated", 7, steps(vec![Step::Token(97), Step::Hang]));
    worker.info.max_tokens = 1 << 20;
    assert!(front.register(worker.info.clone()).await.accepted);
    // Tokens of one digit: a body of 40 kB, and 80 kB as a prompt.
    let body = json!({"prompt": vec![7; 20_000], "n": 2, "stream": true, "max_tokens": 9});
    let mut running = Vec::new();
    let refused = loop {
        let reply = front.post("/v1/completions", &body).await;
        if reply.status != 200 {
            break reply;
        }
        running.push(reply);
        assert!(running.len() < 12, "more than the client's share of 800 kB");
    };
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert!(running.len() >= 8, "{}: answers to one prompt share it", running.len());
    drop(running);
    front.until_metrics_say("host_text_bytes 0\n").await;
}

#[tokio::test]
async fn the_names_of_a_running_requests_arguments_count_in_its_clients_share() {
    // The prompt does not show the tools.
    let template = "{# <function=f> <parameter=p> #}{% if tools %}{% endif %}{{ messages[0].content }}";
    let template = ChatTemplate::new(template.into(), String::new(), String::new()).unwrap();
    let mut config = config();
    config.max_text_bytes = 1_000_000;
    config.text.template = Some(Arc::new(template));
    let mut front = Front::start(config).await;
    let _worker = front.worker("all", "aggregated", steps(vec![Step::Token(97), Step::Hang])).await;
    // Names of 40 kB, and as many bytes to keep them.
    let properties: Map<String, Value> =
        (0..400).map(|at| (format!("{at:0>100}"), json!({"type": "integer"}))).collect();
    let parameters = json!({"type": "object", "properties": properties});
    let body = json!({
        "messages": [{"role": "user", "content": "abc"}], "stream": true, "max_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    });
    let mut running = Vec::new();
    let refused = loop {
        let reply = front.post("/v1/chat/completions", &body).await;
        if reply.status != 200 {
            break reply;
        }
        running.push(reply);
        assert!(running.len() < 20, "more than the client's share of 800 kB");
    };
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert!(running.len() >= 4, "{}", running.len());
    drop(running);
    front.until_metrics_say("host_text_bytes 0\n").await;
}
