//! `#[agent]`: from an `impl` block to an implementation of `tools_sdk::agent::Agent`.

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::{Error, FnArg, ImplItem, ImplItemFn, ItemImpl, Result, Type};

use crate::arguments::{Arguments, check_name, description};

pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let arguments = Arguments::parse(arguments, &["name"])?;
    let block: ItemImpl = syn::parse2(item)?;
    let Some(name) = arguments.name else {
        return Err(Error::new(Span::call_site(), "name the agent: `#[agent(name = \"...\")]`"));
    };
    check_name(&name.value(), name.span())?;
    let description = description(&block.attrs, "an agent")?;
    let ty = &block.self_ty;
    let Some(on_event) = function(&block, "on_event") else {
        return Err(Error::new_spanned(
            ty,
            "an agent has `fn on_event(event: Event, params: Params) -> Result<(), AgentError>`",
        ));
    };
    let params = params_type(on_event)?;
    let start = function(&block, "start").map(|_| {
        quote! {
            fn start(params: Self::Params) -> ::core::result::Result<(), ::tools_sdk::Error> {
                #ty::start(params)
            }
        }
    });
    Ok(quote! {
        #block

        impl ::tools_sdk::agent::Agent for #ty {
            type Params = #params;
            const NAME: &'static str = #name;
            const DESCRIPTION: &'static str = #description;

            #start

            fn on_event(
                event: ::tools_sdk::agent::Event,
                params: Self::Params,
            ) -> ::core::result::Result<(), ::tools_sdk::Error> {
                #ty::on_event(event, params)
            }
        }

        ::tools_sdk::export_agent!(#ty);
    })
}

fn function<'a>(block: &'a ItemImpl, name: &str) -> Option<&'a ImplItemFn> {
    block.items.iter().find_map(|item| match item {
        ImplItem::Fn(function) if function.sig.ident == name => Some(function),
        _ => None,
    })
}

fn params_type(function: &ImplItemFn) -> Result<&Type> {
    let inputs = &function.sig.inputs;
    match (inputs.len(), inputs.iter().nth(1)) {
        (2, Some(FnArg::Typed(params))) => Ok(&params.ty),
        _ => Err(Error::new_spanned(&function.sig, "expected `fn on_event(event: Event, params: Params)`")),
    }
}
