//! The server that is measured.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::cli::server::Client;

/// A server, and the name of its model.
#[derive(Clone)]
pub struct Server {
    /// A client of it.
    pub client: Arc<Client>,
    /// The model's name there.
    pub model: String,
}

impl Server {
    /// A server, with the name of its model.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn find(client: Client) -> anyhow::Result<Self> {
        let model = client.model().await.map_err(anyhow::Error::msg)?;
        Ok(Self { client: Arc::new(client), model })
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// A sentence, when the server gives none.
    pub async fn tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        let body = json!({"model": self.model, "prompt": text, "add_special_tokens": false});
        let mut answer = self.client.post("/tokenize", &body).await.map_err(|error| error.to_string())?;
        if !answer.status.is_success() {
            return Err(answer.error().await);
        }
        let text = answer.rest().await?;
        let tokens = |answer: Value| serde_json::from_value(answer.get("tokens")?.clone()).ok();
        serde_json::from_str(&text).ok().and_then(tokens).ok_or_else(|| "/tokenize gave no tokens".to_owned())
    }
}
