//! Checks of guests: which agents and tools are found, and what is wrong with those that cannot be used.

use serde_json::Value;
use tokio::runtime::Handle;

use super::Check;
use crate::agent::{Guests, GuestsConfig};
use crate::cli::client::Client;
use crate::cli::failure::Outcome;
use crate::cli::options::Options;
use crate::error::Error;

/// One check for all that can be used, and one for each that cannot.
pub(super) fn guests(options: &Options, handle: &Handle) -> Outcome<Vec<Check>> {
    let address = store::holder(&options.data_dir()?).and_then(|holder| holder.address);
    let (agents, tools) = match address.map(|address| ask(&Client::new(address))) {
        Some(Ok(answer)) => answer,
        Some(Err(failure)) => {
            return Ok(vec![Check::warning("guests", failure.to_string(), "ask again in a moment")]);
        }
        None => load(options, handle)?,
    };
    let names = |items: &[Value]| -> Vec<String> {
        items.iter().filter(|item| item["error"].is_null()).map(name).collect()
    };
    let (usable_agents, usable_tools) = (names(&agents), names(&tools));
    let mut checks = Vec::new();
    if usable_agents.is_empty() && usable_tools.is_empty() {
        let dirs: Vec<String> = options.guest_dirs()?.iter().map(|dir| dir.display().to_string()).collect();
        let found = match dirs.len() {
            0 => "no directory of guests was found".to_owned(),
            _ => format!("no agents and no tools in {}", dirs.join(", ")),
        };
        let fix =
            "name the directory of NAME.wasm files with --guests; without guests sessions are plain chats";
        checks.push(Check::warning("guests", found, fix));
    } else {
        let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let found = format!("agents: {}; tools: {}", list(&usable_agents), list(&usable_tools));
        checks.push(Check::ok("guests", found));
    }
    for broken in agents.iter().chain(&tools).filter(|item| !item["error"].is_null()) {
        let found = format!("{}: {}", name(broken), broken["error"].as_str().unwrap_or("cannot be used"));
        checks.push(Check::warning(
            "guest",
            found,
            "build it again with this version's tools-sdk, or remove it",
        ));
    }
    Ok(checks)
}

fn name(item: &Value) -> String {
    item["name"].as_str().unwrap_or_default().to_owned()
}

/// What the running server has.
fn ask(client: &Client) -> Outcome<(Vec<Value>, Vec<Value>)> {
    let list = |path: &str| -> Outcome<Vec<Value>> {
        Ok(client.get(path)?["data"].as_array().cloned().unwrap_or_default())
    };
    Ok((list("/v1/agents")?, list("/v1/tools")?))
}

/// What a start would find. Compiled code goes to a directory that is removed again: a data directory
/// that does not exist yet must not come into being here.
fn load(options: &Options, handle: &Handle) -> Outcome<(Vec<Value>, Vec<Value>)> {
    let cache = std::env::temp_dir().join(format!("session-runtime-doctor-{}", std::process::id()));
    let config =
        GuestsConfig { cache: cache.clone(), directories: options.guest_dirs()?, ..GuestsConfig::default() };
    let guests = handle.block_on(Guests::open(config));
    // Whether or not it was made; a leftover would only cost space.
    let _ = std::fs::remove_dir_all(&cache);
    let guests = guests?;
    let agents: Result<Vec<Value>, _> = guests.agents().iter().map(serde_json::to_value).collect();
    let tools: Result<Vec<Value>, _> = guests.tools().iter().map(serde_json::to_value).collect();
    Ok((agents.map_err(Error::from)?, tools.map_err(Error::from)?))
}
