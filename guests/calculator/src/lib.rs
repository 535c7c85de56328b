//! The tool `calculator`: arithmetic on decimal numbers of any size, exact as long as the result is rational,
//! and rounded only when it is written.
//!
//! `syntax` reads, `number` computes, `evaluate` walks one with the other. Nothing here knows of files,
//! clocks or the session.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod evaluate;
mod number;
mod syntax;

use tools_sdk::prelude::*;

/// Decimal places of a result when the call does not say.
pub const DEFAULT_DECIMALS: u32 = 10;
/// Most decimal places a call may ask for.
pub const MAX_DECIMALS: u32 = 100;

/// What to compute.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Input {
    /// Arithmetic such as "12.50 + 3 * (4 - 1)". Has + - * / ^ ( ) and sqrt, abs, round, min, max, sum.
    #[schemars(regex(
        pattern = r"^([0-9.,_+*/^() \-\u{d7}\u{f7}\u{2212}]|sqrt\(|abs\(|round\(|min\(|max\(|sum\()+$"
    ))]
    pub expression: String,
    /// Decimal places of the result, 0 to 100. Default: up to 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub decimals: Option<u32>,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Output {
    /// What was computed, as it was read.
    pub expression: String,
    /// The result in decimal.
    pub value: String,
    /// Whether `value` is the result itself; otherwise it is rounded, half away from zero.
    pub exact: bool,
    /// How many places `value` was written with.
    pub precision: String,
}

/// Computes an arithmetic expression exactly, for example a sum of amounts.
#[tool(effect = "pure", text = reading)]
pub fn calculator(input: Input, _context: &Context) -> Result<Output, ToolError> {
    let expression = syntax::parse(&input.expression)?;
    let value = evaluate::evaluate(&expression)?;
    let decimals = input.decimals.unwrap_or(DEFAULT_DECIMALS);
    if decimals > MAX_DECIMALS {
        return Err(ToolError::invalid_input(
            "too_many_decimals",
            format!("{decimals} decimal places were asked for; there are at most {MAX_DECIMALS}"),
        ));
    }
    let (digits, exact) = value.to_decimal(decimals, input.decimals.is_none());
    let precision = match input.decimals {
        Some(1) => "1 decimal place".to_owned(),
        Some(decimals) => format!("{decimals} decimal places"),
        None => format!("up to {DEFAULT_DECIMALS} decimal places"),
    };
    Ok(Output { expression: input.expression.trim().to_owned(), value: digits, exact, precision })
}

fn reading(output: &Output) -> String {
    if output.exact {
        format!("{} = {}", output.expression, output.value)
    } else {
        format!("{} = {} (rounded, {})", output.expression, output.value, output.precision)
    }
}
