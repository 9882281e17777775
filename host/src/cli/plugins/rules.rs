//! `host plugins rules`.

use host_plugins::requirements::{Need, RULES};
use serde_json::{Value, json};

use crate::cli::output::{self, say};

/// Prints the compatibility table.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let row = |rule: &host_plugins::requirements::Rule| -> Value {
            let feature = format!("{:?}", rule.feature);
            match rule.need {
                Need::Capability { role, name } => {
                    json!({"name": rule.name, "feature": feature, "needs_capability": name, "of_role": role, "reason": rule.reason})
                }
                Need::OnlyOne { role } => {
                    json!({"name": rule.name, "feature": feature, "only_one_plugin_of_role": role, "reason": rule.reason})
                }
                Need::AnyOf(others) => {
                    let others: Vec<_> = others.iter().map(|other| format!("{other:?}")).collect();
                    json!({"name": rule.name, "feature": feature, "needs_one_of": others, "reason": rule.reason})
                }
                Need::Also(other) => {
                    json!({"name": rule.name, "feature": feature, "needs_feature": format!("{other:?}"), "reason": rule.reason})
                }
                Need::Without(other) => {
                    json!({"name": rule.name, "feature": feature, "conflicts_with": format!("{other:?}"), "reason": rule.reason})
                }
            }
        };
        output::json(&RULES.iter().map(row).collect::<Vec<_>>())?;
        return Ok(());
    }
    for rule in RULES {
        let need = match rule.need {
            Need::Capability { role, name } => format!("{role} plugin with {name}"),
            Need::OnlyOne { role } => format!("only one {role} plugin"),
            Need::Also(other) => format!("feature {other:?}"),
            Need::AnyOf(_) => rule.need.to_string(),
            Need::Without(other) => format!("not {other:?}"),
        };
        say!("{:<25} {:<21} {need:<42} {}", rule.name, format!("{:?}", rule.feature), rule.reason);
    }
    Ok(())
}
