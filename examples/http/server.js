// A small order service: every POST runs once, and a retry gets the first answer.
//
//   createdb shop && psql -d shop -f schema.sql
//   npm ci && PGDATABASE=shop npm start          then open http://localhost:3000
//
// POST /orders               {"item", "quantity"}   with an Idempotency-Key header
// POST /orders/:id/payment                          with an Idempotency-Key header
// GET  /form, POST /form/order                      the same order, without script or header
//
// Settings, from the environment: PORT; IN_PROGRESS_WAIT, how long a retry waits
// for the first attempt before it is told 409; and libpq's (PGHOST, ...).
import { randomUUID } from 'node:crypto';
import { fileURLToPath } from 'node:url';
import express from 'express';
import pg from 'pg';

const wait = process.env.IN_PROGRESS_WAIT ?? '5 s';
const pool = new pg.Pool();
pool.on('error', () => {}); // an idle connection broke: the pool makes another

const app = express();
app.disable('x-powered-by');
app.use(express.json(), express.urlencoded({ extended: false }), customer);

app.post('/orders', (req, res) => {
  const { item, quantity } = req.body ?? {};
  if (!isOrder(item, quantity)) return refuse(res, 400, 'an order has an item, and a quantity from 1 to 100');
  return answerOnce(req, res, 'orders:create', 'create_order', { item, quantity });
});

app.post('/orders/:id/payment', (req, res) => {
  if (!/^[0-9]{1,18}$/.test(req.params.id)) return refuse(res, 404, 'no such order');
  return answerOnce(req, res, 'orders:pay', 'pay_order', { order: req.params.id });
});

// The form is sent to another address than its own: a POST takes what is cached of
// its address, and then the back button would show a new form with a new token.
app.get('/form', async (req, res) => {
  const { rows: [{ token }] } = await pool.query(
    "SELECT idempotency.issue_token($1, 'order-form', '1 hour') AS token", [req.customer]);
  return showPage(res, 200, `<form method="post" action="/form/order">
    <input type="hidden" name="token" value="${escape(token)}">
    <label>Item <input name="item" value="espresso"></label>
    <label>Quantity <input name="quantity" type="number" min="1" max="100" value="2"></label>
    <button>Order</button>
  </form>`);
});

app.post('/form/order', async (req, res) => {
  const { token, item, quantity: text } = req.body ?? {};
  const quantity = Number(text);
  if (typeof token !== 'string' || !isOrder(item, quantity)) return showPage(res, 400, 'This form is not complete.');

  const { rows: [answer] } = await pool.query('SELECT * FROM submit_order_form($1, $2, $3)',
    [token, req.customer, { item, quantity, customer: req.customer }]).catch((error) => {
    const status = refusalOf(error.code);
    if (!status) throw error;
    return { rows: [{ status: 'refused', http: status, message: error.message }] };
  });

  switch (answer.status) {
    case 'completed': {
      const order = JSON.parse(answer.response);
      return showPage(res, 200, `Order ${order.order}: ${order.quantity} × ${escape(order.item)}, ${order.amount.toFixed(2)}`);
    }
    case 'refused':
      return showPage(res, answer.http, escape(answer.message));
    case 'mismatch':
      return showPage(res, 422, 'This form was sent before, and not the same. <a href="/form">A new form</a>');
    case 'in_progress':
      return showPage(res, 409, 'This form is still being worked on. Send it again in a moment.');
    case 'used':
      return showPage(res, 409, 'This form was sent before. <a href="/form">A new form</a>');
  }
  return showPage(res, 403, 'This form is not valid any more. <a href="/form">A new form</a>');
});

app.use(express.static(fileURLToPath(new URL('public', import.meta.url))));

// What we could not do, we may be able to do later, and the key makes it safe to
// ask again.  What the client did wrong stays wrong.
app.use((error, req, res, next) => {
  if (error.status < 500) return refuse(res, error.status, error.message);
  console.error(error.message);
  res.set('Retry-After', '1');
  return refuse(res, 503, 'try again with the same key');
});

const port = process.env.PORT ?? 3000;
const server = app.listen(port, 'localhost', (error) => {
  if (error) {
    console.error(error.code === 'EADDRINUSE' ? `port ${port} is taken: set PORT to another one` : error.message);
    process.exit(1);
  }
  console.log(`http://localhost:${server.address().port}`);
});

// Who asks: part of the scope, so that nobody can replay another's answer.  A real
// service takes it from the login.
function customer(req, res, next) {
  req.customer = /(?:^|; )customer=([0-9a-f-]{36})/.exec(req.headers.cookie ?? '')?.[1];
  if (!req.customer) {
    req.customer = randomUUID();
    res.cookie('customer', req.customer, { httpOnly: true, sameSite: 'strict' });
  }
  next();
}

function isOrder(item, quantity) {
  return typeof item === 'string' && Number.isInteger(quantity) && quantity >= 1 && quantity <= 100;
}

// Calls a function of the database once for this key; from then on the stored
// answer is what comes back, byte for byte.
async function answerOnce(req, res, operation, sqlFunction, request) {
  const key = /^("?)([!#-~]{1,200})\1$/.exec(req.get('Idempotency-Key') ?? '')?.[2];
  if (!key) return refuse(res, 400, 'the Idempotency-Key header is missing or malformed');

  const { rows: [answer] } = await pool.query(
    'SELECT status, replayed, response, meta FROM idempotency.run($1, $2, $3, $4, wait => $5, record_errors => true)',
    [`shop:${operation}:${req.customer}`, key, sqlFunction, { ...request, customer: req.customer }, wait]);

  if (answer.replayed) res.set('Idempotent-Replayed', 'true');
  switch (answer.status) {
    case 'completed':
      return res.status(201).type('json').send(answer.response);
    case 'failed': // the shop refused, or the data is bad
      return refuse(res, refusalOf(answer.meta.sqlstate) ?? 400, answer.meta.message);
    case 'mismatch':
      return refuse(res, 422, 'this key was used for another request');
    case 'in_progress':
      res.set('Retry-After', '1');
      return refuse(res, 409, 'the first request with this key is still in progress');
  }
  throw new Error(`unexpected status ${answer.status}`);
}

// The HTTP status in a SQLSTATE of class SH (schema.sql); undefined in others.
function refusalOf(sqlstate) {
  return /^SH[45][0-9]{2}$/.test(sqlstate) ? Number(sqlstate.slice(2)) : undefined;
}

function refuse(res, status, message) {
  return res.status(status).json({ error: message });
}

function showPage(res, status, body) {
  return res.status(status).send(`<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Shop</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/page.css">
<main>
  <h1>Shop</h1>
  ${body}
</main>
</html>
`);
}

function escape(text) {
  return String(text).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}
