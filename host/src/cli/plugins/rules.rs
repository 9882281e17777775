//! `host plugins rules`.

use serde_json::{Value, json};

use crate::cli::output::say;
use crate::plugins::requirements::{Need, RULES};

/// Prints the compatibility table.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let row = |rule: &crate::plugins::requirements::Rule| -> Value {
            let feature = format!("{:?}", rule.feature);
            match rule.need {
                Need::Capability { role, name } => {
                    json!({"feature": feature, "needs_capability": name, "of_role": role, "reason": rule.reason})
                }
                Need::Also(other) => {
                    json!({"feature": feature, "needs_feature": format!("{other:?}"), "reason": rule.reason})
                }
                Need::Without(other) => {
                    json!({"feature": feature, "conflicts_with": format!("{other:?}"), "reason": rule.reason})
                }
            }
        };
        say!("{}", serde_json::to_string_pretty(&RULES.iter().map(row).collect::<Vec<_>>())?);
        return Ok(());
    }
    for rule in RULES {
        let need = match rule.need {
            Need::Capability { role, name } => format!("{role} plugin with {name}"),
            Need::Also(other) => format!("feature {other:?}"),
            Need::Without(other) => format!("not {other:?}"),
        };
        say!("{:<21} {need:<42} {}", format!("{:?}", rule.feature), rule.reason);
    }
    Ok(())
}
