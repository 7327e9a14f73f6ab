// The page in Chromium, the service behind it, and everything that can go wrong
// between them.  Each time: one order, one payment, one answer.
//
//   createdb shop && psql -d shop -f schema.sql && npm ci
//   PGDATABASE=shop npm test
//
// Settings, from the environment: CHROMIUM, the browser (/usr/bin/chromium);
// SCREENSHOT, a PNG file to make of the page.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { once } from 'node:events';
import { after, before, beforeEach, test as testOf } from 'node:test';
import { fileURLToPath } from 'node:url';
import pg from 'pg';
import { chromium } from 'playwright-core';

const database = new pg.Pool();
let browser, server, url;

// A test that hangs has failed.
const test = (name, steps) => testOf(name, { timeout: 30_000 }, steps);

before(async () => {
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
      '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
  await startServer(0);
});

after(async () => {
  await browser?.close();
  server?.kill();
  await database.end();
});

beforeEach(async () => {
  await database.query('TRUNCATE orders, payment RESTART IDENTITY');
});

test('a double click', async () => {
  const { page, requests } = await visit();

  await page.dblclick('#order');
  await page.getByText('Order 1: 2 × espresso, 5.00').waitFor();
  await page.dblclick('#pay');
  await page.getByText('Paid 5.00, receipt 1').waitFor();
  assert.equal(requests.length, 2, 'the button was disabled while it waited');
  await oneOrderOnePayment();
});

test('five parallel clicks, in five tabs', async () => {
  const { context, page } = await visit();
  const tabs = [page];
  while (tabs.length < 5) tabs.push(await open(context));

  const answered = (response) => response.url() === `${url}/orders` && response.status() !== 409;
  const responses = Promise.all(tabs.map((tab) => tab.waitForResponse(answered)));
  await whileLocked('product', async () => {
    const sent = Promise.all(tabs.map((tab) => tab.waitForRequest('**/orders')));
    await Promise.all(tabs.map((tab) => tab.click('#order')));
    await sent;
    await requestsWaiting(2);
  });
  const answers = await Promise.all((await responses).map((response) => response.text()));
  assert.equal(new Set(answers).size, 1, 'five times the same answer');
  for (const tab of tabs) await tab.getByText('Order 1: 2 × espresso').waitFor();

  await Promise.all(tabs.map((tab) => tab.evaluate(() => document.getElementById('pay').click())));
  for (const tab of tabs) await tab.getByText('receipt 1').waitFor();
  await oneOrderOnePayment();
});

test('the response is lost after the commit', async () => {
  const { page, requests } = await visit();

  for (const [button, path, text] of [['#order', '**/orders', 'Order 1:'], ['#pay', '**/payment', 'receipt 1']]) {
    const lost = [];
    await page.route(path, async (route) => {
      lost.push(await (await route.fetch()).text());
      await route.abort('connectionreset');
    }, { times: 2 });
    const answered = page.waitForResponse(path);
    await page.click(button);
    const response = await answered;
    assert.equal(response.headers()['idempotent-replayed'], 'true');
    assert.deepEqual(lost, Array(2).fill(await response.text()), 'the first answer, byte for byte');
    await page.getByText(text).waitFor();
  }
  assert.equal(new Set(requests.map((request) => request.headers()['idempotency-key'])).size, 2,
    'one key per operation');
  await oneOrderOnePayment();
});

test('no answer at all, a reload, and the button once more', async () => {
  const { page, requests } = await visit();

  for (const [button, path, text] of [['#order', '**/orders', 'Order 1:'], ['#pay', '**/payment', 'receipt 1']]) {
    await page.route(path, async (route) => {
      await route.fetch();
      await route.abort('connectionreset');
    });
    await page.click(button);
    await page.getByText('No answer yet').waitFor();
    await page.unroute(path);
    await page.reload();
    await page.click(button);
    await page.getByText(text).waitFor();
  }
  assert.equal(new Set(requests.map((request) => request.headers()['idempotency-key'])).size, 2,
    'the key outlived the reload');
  await oneOrderOnePayment();
});

test('an answer that was lost, as the page tells it', async () => {
  const { page } = await visit();

  await page.click('#order');
  await page.getByText('Order 1:').waitFor();
  await page.check('#lose');
  await page.click('#pay');
  await page.getByText('receipt 1').waitFor();
  const [ordered, lost, replayed] = await page.locator('#wire li').allTextContents();
  assert.match(ordered, /^POST \/orders, key [0-9a-f]{8}…, attempt 1: 201$/);
  assert.match(lost, /^POST \/orders\/1\/payment, key [0-9a-f]{8}…, attempt 1: no answer$/);
  assert.equal(replayed, lost.replace('1: no answer', '2: 201, Idempotent-Replayed: true'));
  if (process.env.SCREENSHOT) {
    await page.setViewportSize({ width: 560, height: 420 });
    await page.screenshot({ path: process.env.SCREENSHOT });
  }
  await oneOrderOnePayment();
});

test('the server is killed in the middle, and its transaction commits', async () => {
  const { page } = await visit();

  for (const [table, button, text] of [['product', '#order', 'Order 1:'], ['orders', '#pay', 'receipt 1']]) {
    await whileLocked(table, async () => {
      await page.click(button);
      await requestsWaiting(1);
      await killServer();
    });
    await startServer();
    await untilAnswered(page, button, text);
  }
  await oneOrderOnePayment();
});

test('the server and its transaction are killed in the middle', async () => {
  const { page } = await visit();

  for (const [table, button, text] of [['product', '#order', /Order \d:/], ['orders', '#pay', /receipt \d/]]) {
    await whileLocked(table, async () => {
      await page.click(button);
      await requestsWaiting(1);
      await killServer();
      await database.query('SELECT pg_terminate_backend(pid) FROM (' + waiting + ') w');
      await requestsWaiting(0);
    });
    await startServer();
    await untilAnswered(page, button, text);
  }
  await oneOrderOnePayment();
});

test('two tabs, one after the other', async () => {
  const { context, page } = await visit();
  const other = await open(context);

  await page.click('#order');
  await other.getByText('Order 1:').waitFor();
  await other.click('#pay');
  await page.getByText('receipt 1').waitFor();
  await oneOrderOnePayment();
});

test('two tabs that do not ask for the same', async () => {
  const { context, page } = await visit();
  const other = await open(context);

  await whileLocked('product', async () => {
    await page.click('#order');
    await requestsWaiting(1);
    // as if this tab had not yet seen what the first one stored
    await other.evaluate(() => {
      const state = JSON.parse(localStorage.getItem('shop'));
      localStorage.setItem('shop', JSON.stringify({ key: state.key }));
      window.dispatchEvent(new Event('storage'));
    });
    await other.fill('[name=quantity]', '3');
    await other.click('#order');
  });
  await page.getByText('Order 1: 2 × espresso').waitFor();
  await other.getByText('Order 1: 2 × espresso').waitFor();
  assert.equal((await database.query('SELECT FROM orders')).rowCount, 1);
});

test('a refusal is an answer: the key goes, the next press is a new request', async () => {
  const { page, requests } = await visit();

  await page.selectOption('[name=item]', 'last cake');
  await page.fill('[name=quantity]', '1');
  await page.click('#order');
  await page.getByText('sold out').waitFor();
  await database.query("UPDATE product SET stock = 1 WHERE name = 'last cake'");
  await page.click('#order');
  await page.getByText('Order 1: 1 × last cake').waitFor();
  assert.equal(requests.length, 2);
  await page.click('#pay');
  await page.getByText('receipt 1').waitFor();
  await oneOrderOnePayment();
});

test('the form: sent, reloaded, back and sent again', async () => {
  const { page, requests } = await visit('/form');
  const token = await page.inputValue('[name=token]');
  const ordered = page.getByText('Order 1: 2 × espresso, 5.00');

  await page.click('button');
  await ordered.waitFor();
  await page.reload(); // sends the form again
  await ordered.waitFor();
  await page.goBack();
  assert.equal(await page.inputValue('[name=token]'), token, 'the same form');
  await page.click('button');
  await ordered.waitFor();
  assert.equal(requests.length, 3);

  await page.goBack();
  await page.fill('[name=quantity]', '3');
  await page.click('button');
  await page.getByText('sent before, and not the same').waitFor();
  assert.equal((await database.query('SELECT FROM orders')).rowCount, 1);

  await page.click('a');
  await page.click('button');
  await page.getByText('Order 2:').waitFor();
});

test('the form: five times at once, and by others', async () => {
  const cookie = await newCustomer();
  const form = await (await fetch(`${url}/form`, { headers: { cookie } })).text();
  const token = /name="token" value="([^"]+)"/.exec(form)[1];
  const submit = (fields, by = cookie) => fetch(`${url}/form/order`, {
    method: 'POST', headers: { cookie: by }, body: new URLSearchParams({ token, item: 'espresso', quantity: 2, ...fields }),
  });
  let responses;

  assert.equal((await submit({ item: 'last cake', quantity: 100 })).status, 409, 'refused: the token is unused');
  await whileLocked('product', async () => {
    responses = Array.from({ length: 5 }, () => submit());
    await requestsWaiting(5);
  });
  const pages = await Promise.all((await Promise.all(responses)).map((response) => response.text()));
  assert.equal(new Set(pages).size, 1);
  assert.match(pages[0], /Order 1:/);
  assert.equal((await submit({ token: token.slice(0, -1) })).status, 403, 'no such token');
  assert.equal((await submit({ token: '' })).status, 403);
  assert.equal((await submit({}, await newCustomer())).status, 403, "another customer's");
  assert.equal((await submit({ quantity: 'two' })).status, 400);

  await database.query("SELECT idempotency.forget($1, (idempotency.check_token($2, $3, 'order-form')).id)",
    [`shop:order-form:${cookie.split('=')[1]}`, token, cookie.split('=')[1]]);
  assert.equal((await submit()).status, 409, 'the token is used even when the answer is gone');
  assert.equal((await database.query('SELECT FROM orders')).rowCount, 1);
});

test('a port that is taken', async () => {
  const second = spawn(process.execPath, ['server.js'], {
    cwd: fileURLToPath(new URL('.', import.meta.url)),
    env: { ...process.env, PORT: new URL(url).port },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  const [[line], [code]] = await Promise.all([once(second.stderr, 'data'), once(second, 'exit')]);
  assert.match(String(line), /^port \d+ is taken: set PORT/);
  assert.equal(code, 1);
});

test('the header', async () => {
  const order = { item: 'espresso', quantity: 1 };
  const key = randomUUID();
  const cookie = await newCustomer();
  const first = await post('/orders', order, { cookie, key });
  const again = await post('/orders', { quantity: 1, item: 'espresso' }, { cookie, key });

  assert.deepEqual([first.status, first.replayed], [201, null]);
  assert.deepEqual([again.status, again.replayed], [201, 'true']);
  assert.equal(again.body, first.body);
  assert.equal((await post('/orders', order, { cookie })).status, 400, 'no key');
  assert.equal((await post('/orders', order, { cookie, key: 'a key' })).status, 400, 'a malformed key');
  assert.equal((await post('/orders', order, { cookie, key: 'half"' })).status, 400, 'a quote too many');
  assert.equal((await post('/orders', { item: 'espresso' }, { cookie, key: randomUUID() })).status, 400);
  assert.equal((await post('/orders', { ...order, quantity: 2 }, { cookie, key })).status, 422, 'another request');
  assert.equal((await post('/orders/1/payment', {}, { cookie, key })).status, 201, 'another operation');
  assert.equal((await post('/orders/1/payment', {}, { cookie, key: randomUUID() })).status, 409, 'already paid');
  await oneOrderOnePayment();

  const other = { cookie: await newCustomer() };
  await post('/orders', order, { ...other, key: randomUUID() });
  const payments = await Promise.all(Array.from({ length: 5 }, () =>
    post('/orders/2/payment', {}, { ...other, key: randomUUID() })));
  assert.deepEqual(payments.map((payment) => payment.status).sort(), [201, 409, 409, 409, 409], 'five keys, one payment');

  const stranger = await newCustomer();
  assert.equal((await post('/orders/1/payment', {}, { cookie: stranger, key })).status, 404);
  const theirs = await post('/orders', order, { cookie: stranger, key });
  assert.deepEqual([theirs.status, theirs.replayed], [201, null], "another's key tells nothing");
});

test('a refusal is replayed under its key', async () => {
  const cookie = await newCustomer();
  const key = randomUUID();
  const order = { item: 'espresso', quantity: 100 };

  await database.query("UPDATE product SET stock = 0 WHERE name = 'espresso'");
  const first = await post('/orders', order, { cookie, key });
  await database.query("UPDATE product SET stock = 1000 WHERE name = 'espresso'");
  const again = await post('/orders', order, { cookie, key });
  assert.deepEqual([first.status, first.replayed], [409, null]);
  assert.deepEqual([again.status, again.replayed], [409, 'true']);
  assert.equal(again.body, first.body);
});

test('a retry that does not get an answer in time is told so', async () => {
  const cookie = await newCustomer();
  const key = randomUUID();
  const order = { item: 'espresso', quantity: 1 };
  let first;

  await whileLocked('product', async () => {
    first = post('/orders', order, { cookie, key });
    await requestsWaiting(1);
    const second = await post('/orders', order, { cookie, key });
    assert.deepEqual([second.status, second.retryAfter], [409, '1']);
  });
  assert.equal((await first).status, 201);
});

// A new customer's browser, on the page, and the POST requests that it sends.
async function visit(path = '/') {
  const context = await browser.newContext();
  const page = await open(context, path);
  const requests = [];
  page.on('request', (request) => request.method() === 'POST' && requests.push(request));
  return { context, page, requests };
}

// Waits for the answer, and presses the button again when the page has given up.
async function untilAnswered(page, button, text) {
  const answer = page.getByText(text);
  const none = page.getByText('No answer yet');
  for (;;) {
    await answer.or(none).first().waitFor();
    if (await answer.isVisible()) return;
    await page.click(button);
    await none.waitFor({ state: 'hidden' });
  }
}

async function open(context, path = '/') {
  const page = await context.newPage();
  page.setDefaultTimeout(10_000);
  await page.goto(url + path);
  return page;
}

async function newCustomer() {
  return (await fetch(url)).headers.get('set-cookie').split(';')[0];
}

async function post(path, body, { cookie, key }) {
  const response = await fetch(url + path, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', cookie, ...(key && { 'Idempotency-Key': `"${key}"` }) },
    body: JSON.stringify(body),
  });
  return {
    status: response.status,
    body: await response.text(),
    replayed: response.headers.get('idempotent-replayed'),
    retryAfter: response.headers.get('retry-after'),
  };
}

async function startServer(port = new URL(url).port) {
  server = spawn(process.execPath, ['server.js'], {
    cwd: fileURLToPath(new URL('.', import.meta.url)),
    env: { ...process.env, PORT: port, IN_PROGRESS_WAIT: '500 ms', PGAPPNAME: 'shop' },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const [line] = await once(server.stdout, 'data');
  url = String(line).trim();
}

async function killServer() {
  server.kill('SIGKILL');
  await once(server, 'exit');
}

// Holds what writes to a table in the middle of its transaction, while act() runs.
async function whileLocked(table, act) {
  const client = await database.connect();
  try {
    await client.query(`BEGIN; LOCK TABLE ${table} IN EXCLUSIVE MODE`);
    await act();
  } finally {
    await client.query('COMMIT');
    client.release();
  }
}

// The server's transactions that wait for a lock.
const waiting = "SELECT pid FROM pg_stat_activity WHERE application_name = 'shop' AND wait_event_type = 'Lock'";

async function requestsWaiting(count) {
  for (;;) {
    const { rowCount } = await database.query(waiting);
    if (count === 0 ? rowCount === 0 : rowCount >= count) return;
    await new Promise((resume) => setTimeout(resume, 20));
  }
}

async function oneOrderOnePayment() {
  const { rows } = await database.query(
    "SELECT (SELECT count(*)::int FROM orders) AS orders, (SELECT count(*)::int FROM orders WHERE status = 'PAID') AS paid, (SELECT count(*)::int FROM payment) AS payments");
  assert.deepEqual(rows, [{ orders: 1, paid: 1, payments: 1 }]);
}
