// npm's sigstore as an oracle: node verify_bundle.cjs PACKAGES BUNDLE TUF_URL TUF_ROOT ISSUER IDENTITY CACHE
// Exit 0 if it accepts the bundle with the trusted root that it gets itself, by TUF.
const [packages, file, url, root, issuer, identity, cache] = process.argv.slice(2);
const { createRequire } = require("node:module");
const { readFileSync } = require("node:fs");
const sigstore = createRequire(`${packages}/x.js`)("sigstore");
const bundle = JSON.parse(readFileSync(file, "utf8"));
const options = {
  certificateIssuer: issuer,
  certificateIdentityURI: identity,
  tufMirrorURL: url,
  tufRootPath: root,
  tufCachePath: cache,
  tufForceInit: true,
};
sigstore.verify(bundle, options).then(
  () => process.exit(0),
  (error) => {
    console.error(`${error.code ?? error.name}: ${error.message}`);
    process.exit(3);
  },
);
